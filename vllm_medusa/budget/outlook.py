"""What drafting would bring: survivals of the latest drafts, corrected by what became of them.

A draft node's survival is the chance that it ends up on the accepted path, as the heads see it. Of
the drafts of all requests a histogram over survivals is kept, which forgets. A batch that is so
many times as large has so many times the nodes in every bin; the best first, their sum is what its
best nodes would bring. Accepted tokens say how far survivals of each size are to be believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats

_OCTAVES, _PARTS = 10, 4  # of survivals from 1 down to 1/1024, and bins of each
_BUCKETS = 6  # of the correction, an octave each; the last has all below
_WINDOW = 512.0  # requests' steps by which survivals are known
_RATIO_WINDOW = 2048.0  # and the correction
_IDLE = 0.1  # a request's step without drafts ages what is known by so many with
_LEAST = 8.0  # requests' steps that are never forgotten without news
_TRUST = 4.0  # accepted tokens that the survivals' own word is worth
_BOUNDS = (0.2, 2.0)  # of the correction
_SPREAD = 0.5  # of what a single request's drafts bring, relative


class Outlook:
    """Expected tokens by draft nodes, for batches of any size."""

    def __init__(self, taus: Sequence[float] = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)) -> None:
        """Begin with what a calibration found.

        Args:
            taus: tokens per step with 1, 2, .. draft nodes of one request.

        """
        self._count = np.zeros(_OCTAVES * _PARTS)  # nodes by survival, of _seen requests
        self._sum = np.zeros(_OCTAVES * _PARTS)  # their survivals
        self._seen = 0.0  # requests' steps
        self._accepted = np.zeros(_BUCKETS)
        self._predicted = np.zeros(_BUCKETS)
        self._ratio = np.ones(_BUCKETS)
        self._line: tuple[Floats, Floats] | None = None  # nodes of a request and what they bring
        survival = np.minimum.accumulate(np.diff(np.asarray([1.0, *taus])).clip(0.0, 1.0))
        for _ in range(4):  # a first word, soon outvoted
            self._remember(survival[None, :], _octaves(survival[None, :]))

    def observe(
        self,
        survival: npt.ArrayLike,
        verified: Sequence[int] | npt.NDArray[np.integer] = (),
        accepted: Sequence[int] | npt.NDArray[np.integer] = (),
    ) -> None:
        """Learn from a step.

        Args:
            survival: [B, K] of each request's drafts, best first, all that could be verified; 0
                where a request has fewer.
            verified: [B] how many of them were; the best.
            accepted: [B] how many were accepted. Both empty: nothing was verified.

        """
        survival = np.nan_to_num(np.asarray(survival, np.float64)).clip(0.0, 1.0)
        if survival.size == 0:
            return
        octaves = _octaves(survival)
        self._line = None
        self._remember(survival, octaves)
        if len(verified):
            nodes = np.arange(survival.shape[1])[None, :] < np.asarray(verified)[:, None]
            self._correct(survival * nodes, octaves, np.asarray(accepted, np.float64))

    def _remember(self, survival: Floats, octaves: Floats) -> None:
        kept = octaves < _OCTAVES
        values, bins = survival[kept], (octaves[kept] * _PARTS).astype(np.int64)
        size, weight = len(self._count), math.exp(-len(survival) / _WINDOW)
        self._count = weight * self._count + np.bincount(bins, minlength=size)
        self._sum = weight * self._sum + np.bincount(bins, values, size)
        self._seen = weight * self._seen + len(survival)

    def _correct(self, survival: Floats, octaves: Floats, accepted: Floats) -> None:
        """Share what was accepted among the buckets of what was verified, as it was expected."""
        requests = len(survival)
        bucket = np.minimum(octaves.astype(np.int64), _BUCKETS - 1)
        bucket += _BUCKETS * np.arange(requests)[:, None]
        mass = np.bincount(bucket.ravel(), survival.ravel(), requests * _BUCKETS)
        mass = mass.reshape(requests, _BUCKETS)
        believed = mass * self._ratio
        shares = believed * (accepted / np.maximum(believed.sum(1), 1e-12))[:, None]
        weight = math.exp(-requests / _RATIO_WINDOW)
        self._accepted = weight * self._accepted + shares.sum(0)
        self._predicted = weight * self._predicted + mass.sum(0)
        whole = (self._accepted.sum() + _TRUST) / (self._predicted.sum() + _TRUST)
        ratio = (self._accepted + _TRUST * whole) / (self._predicted + _TRUST)
        self._ratio = ratio.clip(*_BOUNDS)

    def idle(self, requests: int) -> None:
        """Say that a step went by without drafts: what is known is older."""
        if self._seen > _LEAST:
            weight = math.exp(-_IDLE * requests / _WINDOW)
            self._count = weight * self._count
            self._sum = weight * self._sum
            self._seen *= weight

    def corrected(self, survival: npt.ArrayLike) -> Floats:
        """Survivals as far as they are to be believed; the better one stays the better one."""
        survival = np.asarray(survival, np.float64)
        ratio = np.interp(_octaves(survival), np.arange(_BUCKETS) + 0.5, self._ratio)
        return (survival * ratio).clip(0.0, 1.0)

    def gain_of(self, survival: npt.ArrayLike) -> Floats:
        """Expected extra tokens of a step by nodes of the whole batch: [K + 1], concave.

        Args:
            survival: of all drafts of the batch, in any order.

        """
        values = np.asarray(survival, np.float64)
        return _curve(self.corrected(np.sort(values, axis=None)[::-1]))

    def gain(self, requests: int, nodes: npt.ArrayLike) -> Floats:
        """Expected extra tokens of a batch of ``requests`` with so many of its best nodes."""
        if self._line is None:
            filled = self._count > 0
            count = self._count[filled] / self._seen
            mean = self._sum[filled] / self._count[filled]
            worth = count * np.minimum.accumulate(self.corrected(mean))
            self._line = tuple(np.concatenate([[0.0], each.cumsum()]) for each in (count, worth))
        return requests * np.interp(np.asarray(nodes, np.float64) / requests, *self._line)

    @property
    def doubt(self) -> float:
        """Relative standard deviation of a gain."""
        return _SPREAD / float(np.sqrt(max(self._seen, 1.0)))

    @property
    def ratio(self) -> Floats:
        """[buckets] what survivals from 1, 1/2, 1/4, .. down are worth."""
        return self._ratio.copy()


def _octaves(survival: Floats) -> Floats:
    """From 0 of the surest on; a chance of 0 is far away."""
    return -np.log2(survival.clip(2.0**-30, 1.0))


def _curve(survival: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.minimum.accumulate(survival))])
