"""What drafting would bring where every request gets the same number of nodes, its best.

That is what can be asked for before there are drafts. It brings less than the best nodes of the
whole batch: unsure requests get as many as sure ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats
from vllm_medusa.budget.outlook import Outlook


class EvenOutlook(Outlook):
    """Expected tokens by draft nodes, which are shared out evenly; they need not be whole."""

    def __init__(self, taus: Sequence[float] = (1.5, 1.7, 1.8, 1.9, 1.95, 2.0)) -> None:
        """Begin with what a calibration found; see `Outlook`."""
        self._places = np.zeros(0)  # survivals of requests' best, second best .. node, summed up
        self._even: Floats | None = None  # what so many nodes of a request bring
        super().__init__(taus)

    def gain(self, requests: int, nodes: npt.ArrayLike) -> Floats:
        """Expected extra tokens of a batch of ``requests`` with so many nodes in all."""
        if self._even is None:
            worth = self.corrected(self._places / max(self._seen, 1e-9))
            self._even = np.concatenate([[0.0], np.minimum.accumulate(worth).cumsum()])
        each = np.asarray(nodes, np.float64) / requests
        return requests * np.interp(each, np.arange(len(self._even)), self._even)

    def idle(self, requests: int) -> None:
        """Say that a step went by without drafts: what is known is older."""
        before = self._seen
        super().idle(requests)
        self._places *= self._seen / before

    def _remember(self, survival: Floats, octaves: Floats) -> None:
        before = self._seen
        super()._remember(survival, octaves)
        aged = (self._seen - len(survival)) / before if before else 0.0
        size = max(len(self._places), survival.shape[1])
        self._places = np.pad(aged * self._places, (0, size - len(self._places)))
        self._places[: survival.shape[1]] += survival.sum(0)
        self._even = None

    def _correct(self, survival: Floats, octaves: Floats, accepted: Floats) -> None:
        super()._correct(survival, octaves, accepted)
        self._even = None
