"""What drafting would bring: survivals of the latest drafts, corrected by what became of them.

A draft node's survival is the chance that it ends up on the accepted path, as the heads see it. Of
the drafts of all requests a histogram over survivals is kept, which forgets. A batch that is so
many times as large has so many times the nodes in every bin; the best first, their sum is what its
best nodes would bring. Accepted tokens say how far survivals of each size are to be believed: by
kind of request, since greedy ones accept far more of the same drafts than sampled ones.

A step drafts a limited number of nodes a request, and says nothing of those beyond. So there is a
histogram for each range of places (first, second, third and fourth, all others), as old as what was
last seen of it.

Drafts that were copied from a request's own text are free of charge, so they come with any limit,
have a histogram of their own, and what they bring is brought without heads too. Their survivals
are measured where they are found, and stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats

Kinds = int | npt.NDArray[np.integer]
Copied = npt.NDArray[np.bool_]

KINDS = 4  # of requests; whoever observes says which is which
LIMITS = (1, 2, 4)  # of a request's nodes, at which a range of places ends
_COPIED = 1 + len(LIMITS)  # stands behind the ranges of places
_OCTAVES, _PARTS = 10, 4  # of survivals from 1 down to 1/1024, and bins of each
_BUCKETS = 6  # of the correction, an octave each; the last has all below
_CENTERS = np.arange(_BUCKETS) + 0.5  # in octaves
_WINDOW = 512.0  # requests' steps by which survivals are known
_RATIO_WINDOW = 2048.0  # and the correction
_IDLE = 0.1  # a request's step without drafts ages what is known by so many with
_LEAST = 8.0  # requests' steps that are never forgotten without news
_TRUST = 4.0  # accepted tokens that the survivals' own word is worth
_BOUNDS = (0.2, 2.0)  # of the correction
_NOTHING = 1e-3  # nodes, or fewer, that were copied
_SPREAD = 0.5  # of what a single request's drafts bring, relative


class Outlook:
    """Expected tokens by draft nodes, for batches of any size."""

    def __init__(self, taus: Sequence[float] = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)) -> None:
        """Begin with what a calibration found.

        Args:
            taus: tokens per step with 1, 2, .. draft nodes of one request.

        """
        shape = (KINDS, _COPIED + 1, _OCTAVES * _PARTS)
        self._count = np.zeros(shape)  # nodes by range of places and survival
        self._sum = np.zeros(shape)  # their survivals
        self._seen = np.zeros(shape[:2])  # requests' steps
        self._accepted = np.zeros((KINDS, _BUCKETS))
        self._predicted = np.zeros((KINDS, _BUCKETS))
        self._ratio = np.ones((KINDS, _BUCKETS))
        self._mix: Floats | None = None  # of the batch's kinds; None: as they were seen
        # within so many ranges: nodes of a request and what they bring
        self._lines: list[tuple[Floats, Floats]] = []
        survival = np.minimum.accumulate(np.diff(np.asarray([1.0, *taus])).clip(0.0, 1.0))
        first = survival[None, :]
        for _ in range(4):  # a first word, soon outvoted
            self._remember(first, _octaves(first), np.zeros(1, np.int64), None)

    def observe(
        self,
        survival: npt.ArrayLike,
        verified: Sequence[int] | npt.NDArray[np.integer] = (),
        accepted: Sequence[int] | npt.NDArray[np.integer] = (),
        kinds: Kinds = 0,
        limit: int | None = None,
        copied: Copied | None = None,
    ) -> None:
        """Learn from a step.

        Args:
            survival: [B, K] of each request's drafts, best first, all that could be verified; 0
                where a request has fewer.
            verified: [B] how many of them were; the best.
            accepted: [B] how many were accepted, copied ones not counted. Both empty: nothing was
                verified.
            kinds: [B] of the requests, or of all, below `KINDS`.
            limit: nodes that were drafted for a request at most; None: all that there are.
            copied: [B, K], where drafts were copied; None: there is no lookup.

        """
        survival = np.nan_to_num(np.asarray(survival, np.float64)).clip(0.0, 1.0)
        if survival.size == 0:
            return
        octaves, of = _octaves(survival), np.broadcast_to(kinds, len(survival))
        self._lines = []
        self._remember(survival, octaves, of, limit, copied)
        if len(verified):
            nodes = np.arange(survival.shape[1])[None, :] < np.asarray(verified)[:, None]
            if copied is not None:
                nodes &= ~copied
            self._correct(survival * nodes, octaves, np.asarray(accepted, np.float64), of)

    def _remember(
        self,
        survival: Floats,
        octaves: Floats,
        kinds: npt.NDArray[np.integer],
        limit: int | None,
        copied: Copied | None = None,
    ) -> None:
        ranges, shape = _ranges(limit), self._count.shape
        places = np.searchsorted(LIMITS, np.arange(survival.shape[1]), side="right")
        kept = (octaves < _OCTAVES) & (places < ranges)
        if copied is not None:
            places = np.searchsorted(LIMITS, (~copied).cumsum(1) - 1, side="right")
            kept = (octaves < _OCTAVES) & ((places < ranges) | copied)
            places = np.where(copied, _COPIED, places)
        bins = (octaves * _PARTS).astype(np.int64)
        bins += shape[2] * (places + shape[1] * kinds[:, None])
        values, bins = survival[kept], bins[kept]
        self._age(len(survival), ranges, copied is not None)
        self._count += np.bincount(bins, None, self._count.size).reshape(shape)
        self._sum += np.bincount(bins, values, self._sum.size).reshape(shape)
        seen = np.bincount(kinds, None, KINDS)
        self._seen[:, :ranges] += seen[:, None]
        if copied is not None:
            self._seen[:, _COPIED] += seen

    def _age(self, requests: int, ranges: int, copied: bool = False) -> None:
        """Forget some of what is known, of ranges without news less."""
        news = np.arange(self._seen.shape[1]) < ranges
        news[_COPIED] = copied
        weight = np.exp(-requests / _WINDOW * np.where(news, 1.0, _IDLE))
        weight[~news & (self._seen.sum(0) <= _LEAST)] = 1.0
        self._count *= weight[:, None]
        self._sum *= weight[:, None]
        self._seen *= weight

    def _correct(
        self,
        survival: Floats,
        octaves: Floats,
        accepted: Floats,
        kinds: npt.NDArray[np.integer],
    ) -> None:
        """Share what was accepted among the buckets of what was verified, as it was expected."""
        requests = len(survival)
        bucket = np.minimum(octaves.astype(np.int64), _BUCKETS - 1)
        bucket += _BUCKETS * np.arange(requests)[:, None]
        mass = np.bincount(bucket.ravel(), survival.ravel(), requests * _BUCKETS)
        mass = mass.reshape(requests, _BUCKETS)
        believed = mass * self._ratio[kinds]
        shares = believed * (accepted / np.maximum(believed.sum(1), 1e-12))[:, None]
        for kind in np.unique(kinds):
            chosen = kinds == kind
            weight = math.exp(-chosen.sum() / _RATIO_WINDOW)
            found = weight * self._accepted[kind] + shares[chosen].sum(0)
            expected = weight * self._predicted[kind] + mass[chosen].sum(0)
            whole = (found.sum() + _TRUST) / (expected.sum() + _TRUST)
            self._accepted[kind], self._predicted[kind] = found, expected
            ratio = (found + _TRUST * whole) / (expected + _TRUST)
            self._ratio[kind] = ratio.clip(*_BOUNDS)

    def expect(self, kinds: Sequence[int]) -> None:
        """Say which kinds of requests the next step has."""
        mix = np.bincount(kinds, minlength=KINDS) / max(len(kinds), 1)
        if self._mix is None or not np.array_equal(mix, self._mix):
            self._mix = mix
            self._forget_lines()

    def _of_a_step(self, values: Floats, seen: Floats) -> Floats:
        """Each kind's part of a request's step, from sums over ``seen`` steps: [kinds, ..].

        Of a kind that was hardly seen it is what the others drafted.
        """
        pooled = seen.sum(0).clip(1e-9)
        if self._mix is None:
            return values / pooled
        mix = self._mix.reshape(-1, *[1] * (values.ndim - 1))
        return mix * (values + _LEAST * values.sum(0) / pooled) / (seen + _LEAST)

    def _forget_lines(self) -> None:
        self._lines = []

    def idle(self, requests: int) -> None:
        """Say that a step went by without drafts: what is known is older."""
        self._age(requests, 0)

    def corrected(
        self, survival: npt.ArrayLike, kinds: Kinds = 0, copied: Copied | None = None
    ) -> Floats:
        """Survivals as far as they are to be believed; what else is given is of their shape."""
        survival = np.asarray(survival, np.float64)
        octaves, found = _octaves(survival), np.zeros_like(survival)
        for kind in np.unique(kinds):
            ratio = np.interp(octaves, _CENTERS, self._ratio[kind])
            found += np.where(np.equal(kinds, kind), survival * ratio, 0.0)
        if copied is not None:
            found = np.where(copied, survival, found)
        return found.clip(0.0, 1.0)

    def gain_of(
        self, survival: npt.ArrayLike, kinds: Kinds = 0, copied: Copied | None = None
    ) -> Floats:
        """Expected extra tokens of a step by nodes of the whole batch: [K + 1], concave.

        Args:
            survival: of all drafts of the batch, in any order.
            kinds: of the requests they are for, or of all.
            copied: which of them were; None: none.

        """
        values = np.asarray(survival, np.float64).ravel()
        of = np.broadcast_to(np.ravel(kinds), values.shape)
        free = values[:0]
        if copied is not None:
            values, of, free = values[~copied], of[~copied], values[copied]
        believed = [free] + [
            self._believed(np.sort(values[of == k])[::-1], k) for k in np.unique(of)
        ]
        best_first = np.sort(np.concatenate(believed))[::-1]
        return np.concatenate([[0.0], np.cumsum(best_first)])

    def _believed(self, survival: Floats, kind: int) -> Floats:
        """Corrected survivals of a kind, best first; the better one stays the better one."""
        ratio = np.interp(_octaves(survival), _CENTERS, self._ratio[kind])
        return np.minimum.accumulate((survival * ratio).clip(0.0, 1.0))

    def gain(self, requests: int, nodes: npt.ArrayLike, limit: int | None = None) -> Floats:
        """Expected extra tokens of a batch of ``requests`` with so many of its best nodes.

        Args:
            requests: of the batch.
            nodes: in all.
            limit: nodes that heads draft for a request at most, one of `LIMITS`; None: any number;
                0: copied ones alone.

        """
        if not self._lines:
            self._lines = self._draw_lines()
        line = self._lines[_ranges(limit)]
        return requests * np.interp(np.asarray(nodes, np.float64) / requests, *line)

    def _draw_lines(self) -> list[tuple[Floats, Floats]]:
        seen = self._seen[:, :, None]
        count, total = self._of_a_step(self._count, seen), self._of_a_step(self._sum, seen)
        filled = count > 0
        mean = total[filled] / count[filled]
        kinds, ranges, _ = np.nonzero(filled)
        worth, order = np.zeros_like(mean), np.argsort(-mean, kind="stable")
        drafted = order[ranges[order] != _COPIED]
        for kind in np.unique(kinds):
            those = drafted[kinds[drafted] == kind]
            worth[those] = self._believed(mean[those], kind)
        worth[ranges == _COPIED] = mean[ranges == _COPIED]
        order = np.argsort(-worth, kind="stable")
        worth, ranges = worth[order], ranges[order]
        count = count[filled][order]
        lines = []
        for end in range(1 + _COPIED):
            within = (ranges < end) | (ranges == _COPIED)
            nodes, gain = (
                np.concatenate([[0.0], each[within].cumsum()]) for each in (count, count * worth)
            )
            lines.append((nodes, gain))
        return lines

    def doubt(self, limit: int | None = None) -> float:
        """Relative standard deviation of a gain with so many nodes of a request at most."""
        seen = self._seen[:, : _ranges(limit)].sum(0).min()
        return _SPREAD / float(np.sqrt(max(seen, 1.0)))

    @property
    def copies(self) -> bool:
        """Whether anything was copied of late."""
        return bool(self._count[:, _COPIED].sum() > _NOTHING)

    @property
    def ratio(self) -> Floats:
        """[kinds, buckets] what survivals from 1, 1/2, 1/4, .. down are worth."""
        return self._ratio.copy()


def _ranges(limit: int | None) -> int:
    """How many ranges of places lie within a limit of nodes."""
    if limit is None or limit > LIMITS[-1]:
        return 1 + len(LIMITS)
    return sum(end <= limit for end in LIMITS)


def _octaves(survival: Floats) -> Floats:
    """From 0 of the surest on; a chance of 0 is far away."""
    return -np.log2(survival.clip(2.0**-30, 1.0))
