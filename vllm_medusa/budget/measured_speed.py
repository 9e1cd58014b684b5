"""Whether drafts pay off in measured time, independent of estimated costs and acceptance."""

from __future__ import annotations

_STEPS, _MIN_SPEED = 128, 0.97  # window, and speed below which drafting stops
_PAUSE_MS = (4e3, 60e3)  # pause after drafts proved slower: first, and at most; it doubles


class MeasuredSpeed:
    """Speed of recent steps with drafts relative to plain ones, and the pause if it is too low.

    Attributes:
        steps: number of steps measured.
        paused_until: end of the pause, in ms of all steps so far.
        failed_ratio: speed that led to the last pause.

    """

    def __init__(self) -> None:
        self._pause, self.paused_until, self.failed_ratio = _PAUSE_MS[0], 0.0, 1.0
        self.restart()

    def restart(self) -> None:
        """Begin a new measurement."""
        self._took = self._plain = 0.0  # ms of the steps; of plain ones for as many tokens
        self.steps = 0

    def add(self, took: float, plain: float) -> None:
        """Record a step, and the time of plain steps for as many tokens."""
        keep = 1.0 - 1.0 / _STEPS
        self._took = keep * self._took + took
        self._plain = keep * self._plain + plain
        self.steps += 1

    def failed(self, now: float) -> bool:
        """Whether drafts proved slower than plain steps; a pause then begins."""
        failed = self.steps > _STEPS / 2 and self._plain < _MIN_SPEED * self._took
        if failed:
            self.paused_until, self.failed_ratio = now + self._pause, self._plain / self._took
            self._pause = min(2 * self._pause, _PAUSE_MS[1])
            self.restart()
        elif self.steps > 4 * _STEPS:
            self._pause = _PAUSE_MS[0]
        return failed
