"""Expected acceptance: the drafter's confidence in recent drafts, corrected by observed acceptance.

A node's survival is the drafter's probability that it is accepted. It is multiplied by the ratio
of accepted to expected tokens for requests of its kind, and counted in a histogram with decay.
A batch is expected to have as many nodes of each survival per request as the histogram has.

A step drafts a limited number of nodes for a request and reveals nothing about others. So there
is a histogram for each range of ranks (best, second, third and fourth, ...). Nodes copied from a
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
RANGE_ENDS = (1, 2, 4, 8, 16, 32)  # ends of the rank ranges of a request's nodes; the last is open
USUAL_TAUS = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)  # tokens per step with 1, 2, .. draft nodes
_COPIED = 1 + len(RANGE_ENDS)  # index after the ranges
_BINS = 32  # in the square root of the survival
_WINDOW = 512.0  # decay of the histogram, in recorded steps of requests
_KEPT = 8.0  # steps of requests kept when no drafts are observed
_RATIO_WINDOW = 2048.0  # the same for the ratio
_PRIOR_STEPS, _PRIOR_TOKENS = 4, 4.0  # weight of the prior
_RATIOS = (0.2, 2.0)  # bounds of the ratio


@dataclass
class Drafted:
    """Drafts of a request.

    Attributes:
        survival: of each draft, best first.
        kind: of the request, below `KINDS`.
        limit: max nodes that heads could draft for it; None: no limit.
        copied: for each draft, nonzero if it needed no head; None: no lookup was done.

    """

    survival: Sequence[float]
    kind: int = 0
    limit: int | None = None
    copied: Sequence[int] | None = None


@dataclass
class Nodes:
    """Drafts of several requests, concatenated: [n] each."""

    requests: int
    owner: Ints  # request's index
    place: Ints  # rank in its request, from 0
    survival: Floats
    kind: Ints
    copied: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, drafts: Sequence[Drafted]) -> Nodes:
        """Concatenate drafts."""
        sizes = np.array([len(draft.survival) for draft in drafts])
        owner = np.repeat(np.arange(len(drafts)), sizes)
        survival = np.concatenate([np.asarray(draft.survival, np.float64) for draft in drafts])
        copied = np.concatenate([draft.copied or [0] * len(draft.survival) for draft in drafts])
        kind = np.array([draft.kind for draft in drafts])[owner]
        place = np.arange(len(owner)) - (sizes.cumsum() - sizes)[owner]
        return cls(len(drafts), owner, place, survival, kind, copied > 0)


class ExpectedAcceptance:
    """Expected accepted tokens by number of draft nodes."""

    def __init__(self, taus: Sequence[float] = USUAL_TAUS) -> None:
        self._count = np.zeros((1 + _COPIED, _BINS))  # nodes
        self._worth = np.zeros((1 + _COPIED, _BINS))  # sum of their survivals
        self._steps = np.zeros(1 + _COPIED)  # of requests
        self._accepted = np.zeros(KINDS)
        self._predicted = np.zeros(KINDS)
        self.ratio = np.ones(KINDS)  # accepted over expected tokens of each kind
        first = np.minimum.accumulate(np.diff([1.0, *taus]).clip(0.0, 1.0))
        ranges = np.searchsorted(RANGE_ENDS, np.arange(len(first)), side="right")
        for _ in range(_PRIOR_STEPS):
            self._count_nodes(first, ranges, _covered(Drafted(first.tolist())).astype(int))

    def believed(self, nodes: Nodes) -> Floats:
        """Survivals [n] corrected by kind; those of copies are measured and returned unchanged."""
        ratio = np.where(nodes.copied, 1.0, self.ratio[nodes.kind])
        return np.nan_to_num(nodes.survival * ratio).clip(0.0, 1.0)

    def observe(
        self, drafts: Sequence[Drafted], verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Update from a step.

        Args:
            drafts: [B] of the requests, verified or not.
            verified: [B] number verified, a prefix.
            accepted: [B] number accepted, excluding copies.

        """
        if not drafts:
            return
        nodes = Nodes.of(drafts)
        believed, drafted = self.believed(nodes), ~nodes.copied
        before = drafted.cumsum() - drafted  # copies have no rank
        first = np.searchsorted(nodes.owner, np.arange(len(drafts)))
        place = before - np.append(before, 0)[first][nodes.owner]
        ranges = np.searchsorted(RANGE_ENDS, place, side="right")
        ranges[nodes.copied] = _COPIED
        covered = np.array([_covered(draft) for draft in drafts])
        kept = covered[nodes.owner, ranges]
        self._count_nodes(believed[kept], ranges[kept], covered.sum(0))
        if any(verified):
            inside = drafted & (nodes.place < np.asarray(verified)[nodes.owner])
            kinds = [draft.kind for draft in drafts]
            survival = np.nan_to_num(nodes.survival[inside]).clip(0.0, 1.0)
            self._correct(survival, nodes.kind[inside], accepted, kinds)

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
        """Accepted tokens per request if the batch's best ``nodes`` [n] per request are verified.

        Args:
            nodes: mean per request.
            limit: max nodes drafted per request; 0: only copies.

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
        """The same if every request has its own best ``limit`` nodes."""
        covered = range(_num_ranges(limit))
        return float((self._worth[covered].sum(1) / self._steps[covered].clip(1e-9)).sum())

    @property
    def copies(self) -> bool:
        """Whether any node was copied recently."""
        return bool(self._count[_COPIED].sum() > 1e-3)


def _num_ranges(limit: int | None) -> int:
    """Number of rank ranges within a limit of nodes."""
    if limit is None or limit > RANGE_ENDS[-1]:
        return _COPIED
    return sum(end <= limit for end in RANGE_ENDS)


def _covered(draft: Drafted) -> npt.NDArray[np.bool_]:
    """Which ranges a request's drafts provide data for; the last are the copies."""
    covered = np.arange(1 + _COPIED) < _num_ranges(draft.limit)
    covered[_COPIED] = draft.copied is not None
    return covered
