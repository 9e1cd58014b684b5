"""What drafts bring: how sure recent drafts were, corrected by what was accepted of them.

A node's survival is the chance that it is accepted, as the drafter sees it. It is multiplied by
what survivals of requests of its kind were worth so far, and counted in a histogram that forgets.
A batch is expected to have as many nodes of each survival per request as the histogram has.

A step drafts a limited number of nodes for a request and shows nothing of those beyond. So there
is a histogram for each range of places (best, second, third and fourth, ...). Nodes copied from a
request's own text, or forced by its grammar, need no heads: they have one of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats

Ints = npt.NDArray[np.integer]

KINDS = 4  # of requests, whose drafts are worth more or less; the caller numbers them
RANGE_ENDS = (1, 2, 4, 8, 16, 32)  # places of a request's nodes; the last range is all beyond
USUAL_TAUS = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)  # tokens per step with 1, 2, .. draft nodes
_COPIED = 1 + len(RANGE_ENDS)  # comes behind the ranges
_BINS = 32  # by the square root of the survival
_WINDOW = 512.0  # steps of requests that the histogram remembers
_KEPT = 8.0  # steps of requests that are not forgotten without news
_RATIO_WINDOW = 2048.0  # the same for the correction
_PRIOR_STEPS, _PRIOR_TOKENS = 4, 4.0  # weight of what is believed at first
_RATIOS = (0.2, 2.0)  # bounds of the correction


class Acceptance:
    """Expected accepted tokens by number of draft nodes."""

    def __init__(self, taus: Sequence[float] = USUAL_TAUS) -> None:
        self._count = np.zeros((1 + _COPIED, _BINS))  # nodes
        self._worth = np.zeros((1 + _COPIED, _BINS))  # their survivals, summed
        self._steps = np.zeros(1 + _COPIED)  # of requests
        self._accepted = np.zeros(KINDS)
        self._predicted = np.zeros(KINDS)
        self.ratio = np.ones(KINDS)  # what a survival of each kind is worth
        first = np.minimum.accumulate(np.diff([1.0, *taus]).clip(0.0, 1.0))
        for _ in range(_PRIOR_STEPS):
            self._count_nodes(first, np.arange(len(first)), 1, _COPIED)

    def believed(self, survival: Floats, kinds: Ints, copied: npt.NDArray[np.bool_]) -> Floats:
        """Survivals [n] corrected by kind; copied ones were measured and stay as they are."""
        ratio = np.where(copied, 1.0, self.ratio[kinds])
        return np.nan_to_num(survival * ratio).clip(0.0, 1.0)

    def observe(
        self,
        survival: Sequence[Sequence[float]],
        verified: Sequence[int],
        accepted: Sequence[int],
        kinds: Sequence[int],
        limit: int | None = None,
        copied: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Learn from a step of B requests.

        Args:
            survival: [B][drafts] of each request's drafts, best first, verified or not.
            verified: [B] how many were verified; the best.
            accepted: [B] how many were accepted, copied ones not counted.
            kinds: [B] of the requests, below `KINDS`.
            limit: nodes that were drafted for a request at most; None: as many as there can be.
            copied: [B][drafts], nonzero where a draft was copied; None: copies were not looked for.

        """
        sizes = np.array([len(values) for values in survival])
        requests = len(sizes)
        if not requests:
            return
        owner = np.repeat(np.arange(requests), sizes)
        kind = np.asarray(kinds)[owner]
        values = np.concatenate([np.asarray(row, np.float64) for row in survival])
        places = np.arange(len(values)) - (sizes.cumsum() - sizes)[owner]
        marks = np.zeros(len(values), np.bool_)
        if copied is not None:
            marks = np.concatenate([np.asarray(row, np.int64) for row in copied]) > 0
            drafted = (~marks).cumsum()
            before = np.concatenate([[0], drafted])[sizes.cumsum() - sizes]
            places = drafted - before[owner] - 1  # copies take no place
        believed, ranges = self.believed(values, kind, marks), _num_ranges(limit)
        self._count_nodes(believed[~marks], places[~marks], requests, ranges)
        if copied is not None:
            self._count_nodes(believed[marks], None, requests, 0)
        if any(verified):
            inside = (np.arange(len(values)) - (sizes.cumsum() - sizes)[owner]) < np.asarray(
                verified
            )[owner]
            inside &= ~marks
            self._correct(values[inside].clip(0.0, 1.0), kind[inside], accepted, kinds)

    def no_copies(self, requests: int) -> None:
        """Learn that for so many requests there was nothing to copy."""
        self._count_nodes(np.zeros(0), None, requests, 0)

    def forget(self, requests: int) -> None:
        """Trust less what was learned before so many steps of requests without drafts."""
        weight = np.where(self._steps > _KEPT, math.exp(-requests / (8 * _WINDOW)), 1.0)
        self._scale(weight)

    def _count_nodes(self, worth: Floats, places: Ints | None, requests: int, ranges: int) -> None:
        """Add nodes to the histograms of the first ``ranges``; without places to the copied one."""
        if places is None:
            place, covered = np.full(len(worth), _COPIED), np.arange(1 + _COPIED) == _COPIED
        else:
            place = np.searchsorted(RANGE_ENDS, places, side="right")
            covered = np.arange(1 + _COPIED) < ranges
        kept = covered[place]
        place, worth = place[kept], worth[kept]
        bins = place * _BINS + np.minimum(np.sqrt(worth) * _BINS, _BINS - 1).astype(np.int64)
        self._scale(np.where(covered, math.exp(-requests / _WINDOW), 1.0))
        shape = self._count.shape
        self._count += np.bincount(bins, minlength=self._count.size).reshape(shape)
        self._worth += np.bincount(bins, worth, self._count.size).reshape(shape)
        self._steps[covered] += requests

    def _scale(self, weight: Floats) -> None:
        self._count *= weight[:, None]
        self._worth *= weight[:, None]
        self._steps *= weight

    def _correct(
        self, survival: Floats, kind: Ints, accepted: Sequence[int], kinds: Sequence[int]
    ) -> None:
        requests = np.bincount(kinds, minlength=KINDS)
        weight = np.exp(-requests / _RATIO_WINDOW)
        self._accepted *= weight
        self._predicted *= weight
        self._accepted += np.bincount(kinds, np.asarray(accepted, np.float64), KINDS)
        self._predicted += np.bincount(kind, survival, KINDS)
        self.ratio = ((self._accepted + _PRIOR_TOKENS) / (self._predicted + _PRIOR_TOKENS)).clip(
            *_RATIOS
        )

    def gain(self, nodes: Floats, limit: int | None) -> Floats:
        """Accepted tokens per request with the batch's best ``nodes`` [n] per request.

        Args:
            nodes: mean of a request.
            limit: nodes that are drafted for a request at most; 0: only copied ones.

        """
        covered = [*range(_num_ranges(limit)), _COPIED]
        scale = self._steps[covered].clip(1e-9)[:, None]
        count = (self._count[covered] / scale).sum(0)[::-1]
        worth = (self._worth[covered] / scale).sum(0)[::-1]
        return np.interp(
            nodes,
            np.concatenate([[0.0], count.cumsum()]),
            np.concatenate([[0.0], worth.cumsum()]),
        )

    def even_gain(self, limit: int) -> float:
        """The same where every request has its own best ``limit`` nodes."""
        covered = range(_num_ranges(limit))
        return float((self._worth[covered].sum(1) / self._steps[covered].clip(1e-9)).sum())

    @property
    def copies(self) -> bool:
        """Whether anything was copied lately."""
        return bool(self._count[_COPIED].sum() > 1e-3)


def _num_ranges(limit: int | None) -> int:
    """How many ranges of places lie within a limit of nodes."""
    if limit is None or limit > RANGE_ENDS[-1]:
        return _COPIED
    return sum(end <= limit for end in RANGE_ENDS)
