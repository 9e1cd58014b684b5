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


SILENT = Progress()
