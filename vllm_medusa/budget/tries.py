"""When a step tries what doesn't look best: what wasn't tried for a while may have changed.

Tries are bold in turn: first what may well be better, then what would be if all that is known of it
were wrong. They get rarer while nothing promises much, and all together may cost a small share of
the time.
"""

from __future__ import annotations

import numpy as np

from vllm_medusa.budget.cost import Floats

_ALLOWANCE = 0.004  # of all time
_SAVED = 4.0  # steps' worth of it, at the start and at most
_DEAREST = 2.0  # steps' worth that a try costs at most; a table that says more may be wrong
_WAIT = (8, 1024)  # steps between tries, doubling
_APART = 100.0  # ms at least: what to try is thought about while the model waits
_NEAR, _WAIT_NEAR = 0.1, 16  # where both are about as fast, tries are cheap
_CHEAP = 0.25  # steps' worth: so are these
_BOLD = (
    1.0,
    2.0,
    3.0,
    4.0,
    6.0,
)  # standard deviations that what is tried may be underrated by, in turn
_LIKELY = 2.0  # so many are no boldness: while that promises something, waiting grows no longer
_GROWTH = 2.0  # of the load, either way, by which all is new


class Tries:
    """A schedule that counts steps; it knows nothing of what is tried."""

    def __init__(self) -> None:
        self.count = 0
        self.turn = 0  # of two in a row, as bold as each other
        self._usual = 0.0  # ms of a step
        self._allowance = 0.0  # ms
        self._requests = 0  # for which the waiting counts
        self._wait, self._waited = _WAIT[0], 0
        self._near = False
        self._since = 0.0  # ms since the last time

    def earn(self, usual: float) -> None:
        """Add the allowance of a step that takes ``usual`` ms."""
        self._since += usual
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
            self._wait, self.turn = _WAIT[0], 0

    @property
    def due(self) -> bool:
        """Whether this step may try something."""
        wait = min(self._wait, _WAIT_NEAR) if self._near else self._wait
        return self._waited >= wait and self._since >= _APART

    def pick(self, rates: Floats, doubts: Floats, lost: Floats) -> int | None:
        """Which of some choices is tried now, if any; its price is taken out of the allowance.

        Args:
            rates: [n] how fast each is, against the best that is known.
            doubts: [n] standard deviations of their logarithms; 0: this is no try.
            lost: [n] ms that a try costs if what is known is right.

        """
        bold = _BOLD[self.turn // 2 % len(_BOLD)]
        hopes = np.where(doubts > 0, rates * np.exp(bold * doubts) - 1.0, 0.0)
        lost = lost.clip(0.0, _DEAREST * self._usual)
        worth = np.where(lost <= self._allowance, hopes / (lost + 0.1 * self._usual), 0.0)
        best = int(worth.argmax())
        self._waited, self._since = 0, 0.0
        self.turn += 1
        if worth[best] <= 0:
            return None
        is_cheap = bold <= _LIKELY or lost[best] < _CHEAP * self._usual
        self._wait = min(2 * self._wait, _WAIT_NEAR if is_cheap else _WAIT[1])
        self._allowance -= float(lost[best])
        self.count += 1
        return best
