"""Expected acceptance: the drafter's confidence in recent drafts, corrected by observed acceptance.

A node's survival is the drafter's probability that it is accepted. It is multiplied by the ratio
of accepted to expected tokens for requests of its kind, and counted in a histogram with decay.
The histogram says how many nodes of each survival a request of the batch is expected to have.

A step drafts a limited number of nodes for a request and reveals nothing about others. So there
is a histogram for each range of ranks (1, 2, 3, 4, 5 to 6, 7 to 8, ...). Nodes copied from a
request's own text, or forced by its grammar, need no heads and have a separate histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats

Ints = npt.NDArray[np.integer]

KINDS = 4  # of requests, whose drafts differ in value; numbered by the caller
# Ends of the rank ranges of a request's nodes; the last range is open. The budget's limits, too.
RANGE_ENDS = (1, 2, 3, 4, 6, 8, 16, 32)
USUAL_TAUS = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)  # tokens per step with 1, 2, .. draft nodes
_COPIED = 1 + len(RANGE_ENDS)  # index after the ranges
_BINS = 32  # in the square root of the survival
_WINDOW = 512.0  # decay of the histogram, in recorded steps of requests
_KEPT = 8.0  # steps of requests kept when no drafts are observed
_RATIO_WINDOW = 2048.0  # the same for the ratio
_PRIOR_STEPS, _PRIOR_TOKENS = 4, 4.0  # weight of the prior
_RATIOS = (0.02, 2.0)  # bounds of the ratio
_RANGES = [sum(end <= rank for end in RANGE_ENDS) for rank in range(1 + RANGE_ENDS[-1])]  # by rank


@dataclass
class Drafted:
    """Drafts of a request.

    Attributes:
        survival: survival of each draft, best first.
        kind: kind of the request, below `KINDS`.
        limit: max nodes that heads could draft for it; None: no limit.
        copied: for each draft, nonzero if it needed no head; None: no lookup was done.

    """

    survival: Sequence[float]
    kind: int = 0
    limit: int | None = None
    copied: Sequence[int] | None = None


class ExpectedAcceptance:
    """Expected accepted tokens by number of draft nodes.

    Attributes:
        ratio: [KINDS] accepted over expected tokens.
        copies: whether any node was copied recently.

    """

    def __init__(self, taus: Sequence[float] = USUAL_TAUS) -> None:
        self._count = np.zeros((1 + _COPIED, _BINS))  # nodes
        self._worth = np.zeros((1 + _COPIED, _BINS))  # sum of their survivals
        self._steps = np.zeros(1 + _COPIED)  # of requests
        self._known_curves: Floats | None = None  # until the histograms change
        self._accepted = np.zeros(KINDS)
        self._predicted = np.zeros(KINDS)
        self.ratio = np.ones(KINDS)
        first = np.minimum.accumulate(np.diff([1.0, *taus]).clip(0.0, 1.0))
        ranges = np.searchsorted(RANGE_ENDS, np.arange(len(first)), side="right")
        for _ in range(_PRIOR_STEPS):
            self._count_nodes(first, ranges, np.array([1.0] * _COPIED + [0.0]))

    def corrected(self, draft: Drafted) -> list[float]:
        """Survivals of a request's drafts, multiplied by the ratio of its kind; NaN becomes 0.

        Those of copies are measured, so they are not corrected.
        """
        ratio = float(self.ratio[draft.kind])
        if draft.copied is None:
            return [_chance(value * ratio) for value in draft.survival]
        pairs = zip(draft.survival, draft.copied, strict=False)
        return [_chance(value if copied else value * ratio) for value, copied in pairs]

    def observe(
        self, drafts: Sequence[Drafted], verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Update from a step.

        In plain Python, because a step has few drafts, for which arrays are slower.

        Args:
            drafts: [B] of the requests, verified or not.
            verified: [B] number verified, a prefix.
            accepted: [B] number accepted, excluding copies.

        """
        if not drafts:
            return
        worth, ranges = [], []  # of the nodes to count
        requests = [0.0] * (1 + _COPIED)
        predicted = [0.0] * KINDS
        for draft, count in zip(drafts, verified, strict=True):
            covered = _num_ranges(draft.limit)
            for each in range(covered):
                requests[each] += 1.0
            requests[_COPIED] += draft.copied is not None
            rank, copied = 0, draft.copied or ()
            for place, value in enumerate(self.corrected(draft)):
                if copied and copied[place]:
                    worth.append(value)
                    ranges.append(_COPIED)
                    continue
                own = _RANGES[min(rank, len(_RANGES) - 1)]
                rank += 1  # copies have none
                if own < covered:
                    worth.append(value)
                    ranges.append(own)
                if place < count:
                    predicted[draft.kind] += _chance(draft.survival[place])
        self._count_nodes(np.array(worth), np.array(ranges, np.int64), np.array(requests))
        if any(verified):
            self._correct(predicted, accepted, [draft.kind for draft in drafts])

    def no_copies(self, requests: int) -> None:
        """Record that nothing could be copied for that many requests."""
        steps = np.zeros(1 + _COPIED)
        steps[_COPIED] = requests
        self._count_nodes(np.zeros(0), np.zeros(0, np.int64), steps)

    def forget(self, requests: int) -> None:
        """Decay estimates by that many steps of requests without drafts."""
        weight = np.where(self._steps > _KEPT, math.exp(-requests / (8 * _WINDOW)), 1.0)
        self._scale(weight)

    def _count_nodes(self, worth: Floats, ranges: Ints, requests: Any) -> None:
        """Add nodes [n] to the histograms, and the number of requests' steps to each."""
        bins = ranges * _BINS + np.minimum(np.sqrt(worth) * _BINS, _BINS - 1).astype(np.int64)
        self._scale(np.exp(-requests / _WINDOW))
        shape = self._count.shape
        self._count += np.bincount(bins, minlength=self._count.size).reshape(shape)
        self._worth += np.bincount(bins, worth, self._count.size).reshape(shape)
        self._steps += requests
        self.copies = bool(self._count[_COPIED].sum() > 1e-3)

    def _scale(self, weight: Floats) -> None:
        self._known_curves = None
        self._count *= weight[:, None]
        self._worth *= weight[:, None]
        self._steps *= weight

    def _correct(
        self, predicted: Sequence[float], accepted: Sequence[int], kinds: Sequence[int]
    ) -> None:
        weight = np.exp(-np.bincount(kinds, minlength=KINDS) / _RATIO_WINDOW)
        self._accepted *= weight
        self._predicted *= weight
        self._accepted += np.bincount(kinds, accepted, KINDS)
        self._predicted += predicted
        ratio = (self._accepted + _PRIOR_TOKENS) / (self._predicted + _PRIOR_TOKENS)
        self.ratio = ratio.clip(*_RATIOS)

    def gain(self, nodes: Floats, limit: int | None) -> Floats:
        """Accepted tokens per request if the batch's best ``nodes`` [n] per request are verified.

        Args:
            nodes: mean per request.
            limit: max nodes drafted per request; 0: only copies.

        """
        ranges = _num_ranges(limit)
        return np.interp(nodes, *self._curves()[:, ranges])

    def _curves(self) -> Floats:
        """[2, 1 + ranges, 1 + _BINS] expected nodes of at least each survival, and their worth.

        Row n is of the first n ranges and copies.
        """
        if self._known_curves is None:
            both = np.stack([self._count, self._worth]) / self._steps.clip(1e-9)[:, None]
            both = np.roll(both, 1, axis=1).cumsum(1)[..., ::-1]  # copies first
            self._known_curves = np.zeros((*both.shape[:2], 1 + _BINS))
            both.cumsum(2, out=self._known_curves[..., 1:])
        return self._known_curves

    def even_gain(self, limit: int | None) -> float:
        """Accepted tokens per request if each request's best ``limit`` nodes are verified."""
        covered = range(_num_ranges(limit))
        return float((self._worth[covered].sum(1) / self._steps[covered].clip(1e-9)).sum())


def _chance(value: float) -> float:
    return min(value, 1.0) if value > 0.0 else 0.0


def _num_ranges(limit: int | None) -> int:
    """Number of rank ranges within a limit of nodes."""
    if limit is None or limit > RANGE_ENDS[-1]:
        return _COPIED
    return sum(end <= limit for end in RANGE_ENDS)
