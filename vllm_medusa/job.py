"""The contract between a job and whoever runs it.

A job is a function of typed options and a `Progress`; it returns a result and knows no console. It
raises ValueError or OSError for what it was given, `JobFailed` for what went wrong on the way. Its
``command`` is the words that ask for it, for the provenance of what it makes.
"""

from __future__ import annotations


class JobFailed(RuntimeError):
    """A job that broke off through no fault of its input; started again, it goes on from there.

    Attributes:
        status: the exit status of a command that ran it.

    """

    status = 1


class Progress:
    """Told by a job how it goes; this one keeps it to itself."""

    def note(self, text: str) -> None:
        """Say what whoever waits wants to know."""

    def warn(self, text: str) -> None:
        """Say what may be other than it was meant."""

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """Say how much of a part of the job is done.

        Args:
            what: the part, such as "hidden states"; another one begins a new count.
            done: units that are done; all of them end the part.
            total: units in all, where that is known.
            text: how it goes, such as "812 tok/s, tau 1.91".

        """


def duration(seconds: float) -> str:
    """A time in a few letters, as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Pace:
    """How long a part of a job still takes, from the first count that is told on."""

    def __init__(self) -> None:
        self._began = self._first = 0.0
        self._total: float | None = -1.0

    def left(self, now: float, done: float, total: float | None) -> float | None:
        """Seconds; None where nothing says how many. Another ``total`` begins a new count."""
        if total != self._total:
            self._began, self._first, self._total = now, done, total
        if total is None or done <= self._first:
            return None
        return (now - self._began) / (done - self._first) * max(0.0, total - done)


SILENT = Progress()
