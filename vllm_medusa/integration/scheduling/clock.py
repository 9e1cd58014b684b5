"""Start and end times of steps, as measured by a scheduler."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass


@dataclass
class Step:
    """A step in flight."""

    started: float  # seconds
    rows: int
    requests: int
    limit: int  # max nodes drafted per request at its end; 0: no head runs
    prefill: bool  # whether it includes prefill
    nodes: int = 0  # drafts verified
    tokens: int = 0  # generated


class StepClock:
    """A step lasts from its start to the start of the next, which follows immediately."""

    def __init__(self) -> None:
        self._in_flight: deque[Step] = deque()  # output pending
        self._last: Step | None = None  # ends when the next one starts

    def begin(self) -> tuple[Step, float] | None:
        """Start a step before it is scheduled; return the ended step and its duration in ms."""
        ended, self._last = self._last, None
        return None if ended is None else (ended, _ms_since(ended.started))

    def start(self, step: Step) -> None:
        """Record the scheduled step."""
        self._in_flight.append(step)

    def output(self) -> Step:
        """Return the step whose output arrived."""
        return self._in_flight.popleft()

    def end(self, step: Step, *, more: bool) -> tuple[Step, float] | None:
        """Record that an output was processed. Returns None: the step ends after its drafting.

        Without ``more`` steps, its end is not observed.
        """
        self._last = step if more else None
        return None


class PipelinedClock(StepClock):
    """Steps are scheduled ahead; a step lasts from the previous output to its own.

    Outputs arrive before the heads run, so the time includes the heads of the previous step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ended_at = 0.0  # seconds, arrival of the last output
        self._heads_ran = 0  # `Step.limit` of the step of the last output

    def end(self, step: Step, *, more: bool) -> tuple[Step, float] | None:
        """Record that an output was processed; return the step, and its duration in ms."""
        ms = _ms_since(max(step.started, self._ended_at))
        self._ended_at = time.perf_counter()
        step.limit, self._heads_ran = self._heads_ran, step.limit
        return step, ms


def _ms_since(seconds: float) -> float:
    return 1e3 * (time.perf_counter() - seconds)
