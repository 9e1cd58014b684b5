"""Console output of all commands: errors, notes, progress; and their exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from vllm_medusa.job import JobFailed, Progress, duration

_PLAIN_SECONDS = 10.0  # between progress lines without a terminal
_DRAWN_SECONDS = 0.1  # between redraws of the bars on a terminal


class Pace:
    """Estimate the time left for a part of a job."""

    def __init__(self) -> None:
        self._began = self._first = 0.0
        self._total: float | None = -1.0

    def left(self, now: float, done: float, total: float | None) -> float | None:
        """Return seconds, None if unknown. Another ``total`` starts a new estimate."""
        if total != self._total:
            self._began, self._first, self._total = now, done, total
        if total is None or done <= self._first:
            return None
        return (now - self._began) / (done - self._first) * max(0.0, total - done)


class ConsoleProgress(Progress):
    """Progress bars on a terminal, else a line every few seconds; a context manager."""

    def __init__(self, console: Console):
        self.console = console
        self._said = time.perf_counter()
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, Pace] = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,  # no extra thread during measurements
        )

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line after a yellow "warning"."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """Move the bar of ``what``."""
        now = time.perf_counter()
        if not self.console.is_terminal:
            left = self._paces.setdefault(what, Pace()).left(now, done, total)
            if now - self._said > _PLAIN_SECONDS:
                self._said = now
                of = "" if total is None else f"/{total:.0f}"
                rest = "" if left is None else f"{duration(left)} left"
                self.note(
                    f"{what}: {done:.0f}{of} {', '.join(filter(None, [text, rest]))}".rstrip()
                )
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.start()
        self._bars.update(
            self._tasks[what], completed=done, total=total, description=f"{what} {text}".strip()
        )
        if now - self._said > _DRAWN_SECONDS:
            self._said = now
            self._bars.refresh()
        if total is not None and done >= total:
            self._bars.refresh()
            self._bars.stop()
            self._bars.remove_task(self._tasks.pop(what))


def run_job(job: Callable[[ConsoleProgress], int], *, interrupted: str) -> int:
    """Run a command's job and return the exit status: its own, 1 or 2 with an error, or 130.

    ``interrupted`` is the message on Ctrl-C, such as "the same command resumes".
    """
    console = Console(file=sys.stderr, highlight=False)
    with ConsoleProgress(console) as progress:
        try:
            return job(progress)
        except (ValueError, OSError) as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            return 2
        except JobFailed as error:
            console.print(f"[bold red]stopped:[/] {escape(str(error))}", soft_wrap=True)
            return error.status
        except KeyboardInterrupt:
            console.print(f"interrupted; {escape(interrupted)}", soft_wrap=True)
            return 130


def hide_loading_bars() -> None:
    """Disable transformers' progress bars while it loads a model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def invocation() -> list[str]:
    """Return the command line, for the provenance of its results."""
    return ["vllm-medusa", *sys.argv[1:]]


def stdout_console() -> Console:
    """Standard output, 120 columns wide for a file or pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)
