"""What drafting would bring where every request gets the same number of nodes, its best.

That is what can be asked for before there are drafts. It brings less than the best nodes of the
whole batch: unsure requests get as many as sure ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.choose import NodeBudget
from vllm_medusa.budget.cost import Floats
from vllm_medusa.budget.outlook import KINDS, LIMITS, Copied, Outlook


class EvenOutlook(Outlook):
    """Expected tokens by draft nodes, which are shared out evenly; they need not be whole."""

    def __init__(self, taus: Sequence[float] = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)) -> None:
        """Begin with what a calibration found; see `Outlook`."""
        # survivals of requests' best, second best .. node, summed up, by kind of request; of how
        # many requests' steps
        self._places = np.zeros((2, KINDS, 0))
        self._even: Floats | None = None  # what so many nodes of a request bring
        super().__init__(taus)

    def gain(self, requests: int, nodes: npt.ArrayLike, limit: int | None = None) -> Floats:
        """Expected extra tokens of a batch of ``requests`` with so many nodes in all."""
        if self._even is None:
            total, seen = self._places
            kinds = np.broadcast_to(np.arange(KINDS)[:, None], total.shape)
            share, part = self._of_a_step(seen, seen), self._of_a_step(total, seen)
            worth = (share * self.corrected(part / share.clip(1e-9), kinds)).sum(0)
            self._even = np.concatenate([[0.0], np.minimum.accumulate(worth).cumsum()])
        each = np.asarray(nodes, np.float64) / requests
        if limit is not None:
            each = each.clip(None, limit)
        return requests * np.interp(each, np.arange(len(self._even)), self._even)

    def _forget_lines(self) -> None:
        super()._forget_lines()
        self._even = None

    def _age(self, requests: int, ranges: int, copied: bool = False) -> None:
        before = self._seen.sum(0)
        super()._age(requests, ranges, copied)
        aged = self._seen.sum(0) / before.clip(1e-9)
        ends = np.searchsorted(LIMITS, np.arange(self._places.shape[2]), side="right")
        self._places *= aged[ends]

    def _remember(
        self,
        survival: Floats,
        octaves: Floats,
        kinds: npt.NDArray[np.integer],
        limit: int | None,
        copied: Copied | None = None,
    ) -> None:
        super()._remember(survival, octaves, kinds, limit, copied)
        known = survival[:, :limit]
        more = max(0, known.shape[1] - self._places.shape[2])
        self._places = np.pad(self._places, ((0, 0), (0, 0), (0, more)))
        np.add.at(self._places[0, :, : known.shape[1]], kinds, known)
        np.add.at(self._places[1, :, : known.shape[1]], kinds, 1.0)
        self._even = None

    def _correct(
        self,
        survival: Floats,
        octaves: Floats,
        accepted: Floats,
        kinds: npt.NDArray[np.integer],
    ) -> None:
        super()._correct(survival, octaves, accepted, kinds)
        self._even = None


class EvenBudget(NodeBudget):
    """Decides on whole nodes a request, so that what is drafted is what is verified."""

    def _choices(
        self, requests: int, sizes: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
        each = np.unique(sizes // requests)
        each = each[each > 0]
        return requests * each, each, self.outlook.gain(requests, requests * each)
