"""The contract between a job and what runs it.

A job is a function of typed options and a `Progress`; it returns a result and knows no console. It
raises ValueError or OSError for what it was given, `JobFailed` for what went wrong on the way. Its
``command`` is the words that ask for it, for the provenance of what it makes.
"""

from __future__ import annotations


class JobFailed(RuntimeError):
    """A job that broke off through no fault of its input; started again, it resumes.

    Attributes:
        status: the exit status of a command that ran it.

    """

    status = 1


class Progress:
    """What a job reports to; this one ignores it."""

    def note(self, text: str) -> None:
        """Take a line that the user wants to know."""

    def warn(self, text: str) -> None:
        """Take a line about what may not be as intended."""

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """Take how much of a part of the job is done.

        Args:
            what: the part, such as "hidden states"; another one begins a new count.
            done: units that are done; all of them end the part.
            total: units in all, where that is known.
            text: more, such as "812 tok/s, tau 1.91".

        """


SILENT = Progress()


def duration(seconds: float) -> str:
    """A time in a few letters, as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plural(count: int, noun: str) -> str:
    """Such as "1 prompt" or "3 prompts"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
