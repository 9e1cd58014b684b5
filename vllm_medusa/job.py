"""The interface between a job and its caller.

A job is a function of typed options and a `Progress`; it returns a result and does not print. It
raises ValueError or OSError for invalid input and `JobFailed` for failures while it runs. Its
``command`` is its command line, stored with the results as their provenance.
"""

from __future__ import annotations


class JobFailed(RuntimeError):
    """A job failed for reasons other than its input; running it again resumes.

    Attributes:
        status: the exit status of a command that ran it.

    """

    status = 1


class Progress:
    """Receives a job's reports; this base class ignores them."""

    def note(self, text: str) -> None:
        """Report a line of information."""

    def warn(self, text: str) -> None:
        """Report a warning."""

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """Report the progress of a part of the job.

        Args:
            what: the part, such as "hidden states"; a new part starts a new count.
            done: completed units; the part ends at ``total``.
            total: number of units, if known.
            text: details, such as "812 tok/s, tau 1.91".

        """


SILENT = Progress()


def duration(seconds: float) -> str:
    """Format a duration, such as "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plural(count: int, noun: str) -> str:
    """Format a count, such as "1 prompt" or "3 prompts"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
