"""When a step tries what doesn't look best: what wasn't tried for a while may have changed.

Tries get rarer while nothing comes of them, and bolder: at first only what may well be better is
tried, later what would be if all that is known of it were wrong. All together they may cost a small
share of the time.
"""

from __future__ import annotations

import numpy as np

from vllm_medusa.budget.cost import Floats

_ALLOWANCE = 0.004  # of all time
_SAVED = 4.0  # steps' worth of it, at the start and at most
_DEAREST = 3.0  # steps' worth that a try costs at most; a table that says more may be wrong
_WAIT = (16, 1024)  # steps between tries
_NEAR, _WAIT_NEAR = 0.1, 128  # where the two are about as fast, or tries promise something
_BOLD, _BOLDER = (1.0, 4.0), 0.5  # standard deviations that what is tried may be underrated by
_GROWTH = 2.0  # of the load, either way, by which all is new


class Tries:
    """A schedule that counts steps; it knows nothing of what is tried."""

    def __init__(self) -> None:
        self.bold = _BOLD[0]
        self.count = 0
        self._usual = 0.0  # ms of a step
        self._allowance = 0.0  # ms
        self._requests = 0  # for which the waiting counts
        self._wait, self._waited = _WAIT[0], 0
        self._near = False

    def earn(self, usual: float) -> None:
        """Add the allowance of a step that takes ``usual`` ms."""
        self._allowance += _ALLOWANCE * usual if self._usual else _SAVED * usual
        self._allowance = min(self._allowance, _SAVED * usual)
        self._usual = usual

    def step(self, requests: int, changed: bool, ratio: float) -> None:
        """Count a step.

        Args:
            requests: its load.
            changed: drafting has just begun or ended.
            ratio: speed with drafts against plain steps.

        """
        self._waited += 1
        self._near = abs(ratio - 1.0) < _NEAR
        if not self._requests / _GROWTH <= requests <= self._requests * _GROWTH:
            self._requests, changed = requests, True
        if changed:
            self._wait, self.bold = _WAIT[0], _BOLD[0]

    @property
    def due(self) -> bool:
        """Whether this step may try something."""
        return self._waited >= min(self._wait, _WAIT_NEAR if self._near else self._wait)

    def pick(self, hopes: Floats, lost: Floats) -> int | None:
        """Which of some choices is tried now, if any; its price is taken out of the allowance.

        Args:
            hopes: [n] how fast each may be, against the best that is known.
            lost: [n] ms that a try costs if what is known is right.

        """
        self._waited = 0
        lost = lost.clip(0.0, _DEAREST * self._usual)
        if not (hopes > 1.0).any():
            self.bold = min(self.bold + _BOLDER, _BOLD[1])
            self._wait = min(2 * self._wait, _WAIT[1])
            return None
        worth = np.where(lost <= self._allowance, (hopes - 1.0) / (lost + 0.1 * self._usual), 0.0)
        best = int(worth.argmax())
        if worth[best] <= 0.0:
            return None
        self._allowance -= float(lost[best])
        self._wait = min(2 * self._wait, max(_WAIT_NEAR, self._wait))
        self.count += 1
        return best
