"""What drafting would bring where every request gets the same number of nodes, its best.

That is what can be asked for before there are drafts. It brings less than the best nodes of the
whole batch: unsure requests get as many as sure ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats
from vllm_medusa.budget.outlook import KINDS, Outlook


class EvenOutlook(Outlook):
    """Expected tokens by draft nodes, which are shared out evenly; they need not be whole."""

    def __init__(self, taus: Sequence[float] = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)) -> None:
        """Begin with what a calibration found; see `Outlook`."""
        # survivals of requests' best, second best .. node, summed up, by kind of request
        self._places = np.zeros((KINDS, 0))
        self._even: Floats | None = None  # what so many nodes of a request bring
        super().__init__(taus)

    def gain(self, requests: int, nodes: npt.ArrayLike) -> Floats:
        """Expected extra tokens of a batch of ``requests`` with so many nodes in all."""
        if self._even is None:
            seen = self._seen[:, None].clip(1e-9)
            kinds = np.broadcast_to(np.arange(KINDS)[:, None], self._places.shape)
            worth = (seen * self.corrected(self._places / seen, kinds)).sum(0) / seen.sum()
            self._even = np.concatenate([[0.0], np.minimum.accumulate(worth).cumsum()])
        each = np.asarray(nodes, np.float64) / requests
        return requests * np.interp(each, np.arange(len(self._even)), self._even)

    def idle(self, requests: int) -> None:
        """Say that a step went by without drafts: what is known is older."""
        before = self._seen.sum()
        super().idle(requests)
        self._places *= self._seen.sum() / before

    def _remember(self, survival: Floats, octaves: Floats, kinds: npt.NDArray[np.integer]) -> None:
        before = self._seen.sum()
        super()._remember(survival, octaves, kinds)
        aged = (self._seen.sum() - len(survival)) / before if before else 0.0
        more = max(0, survival.shape[1] - self._places.shape[1])
        self._places = np.pad(aged * self._places, ((0, 0), (0, more)))
        np.add.at(self._places[:, : survival.shape[1]], kinds, survival)
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
