"""Console output of all commands: errors, notes, progress; and their exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.tree import Tree

from vllm_medusa.job import JobFailed, Progress, duration

_PLAIN_SECONDS = 10.0  # between progress lines without a terminal
_DRAWN_SECONDS = 0.1  # between redraws of the bars on a terminal


class ConsoleProgress(Progress):
    """Progress bars on a terminal, else a line every few seconds; use it as a context manager."""

    def __init__(self, console: Console):
        self.console = console
        self._shown = time.perf_counter()
        self._tasks: dict[str, TaskID] = {}
        self._warned: set[str] = set()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,  # no extra thread during measurements
            get_time=lambda: time.perf_counter(),
            speed_estimate_period=1e9,  # seconds: the remaining time uses the whole history
        )

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line after a yellow "warning", once."""
        if text not in self._warned:
            self._warned.add(text)
            self.console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        """Move the bar of ``what``."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.start()
        number, shown = self._tasks[what], f"{what} {text}".strip()
        self._bars.update(number, completed=done, total=total, description=shown)
        now, drawn = time.perf_counter(), self.console.is_terminal
        if now - self._shown > (_DRAWN_SECONDS if drawn else _PLAIN_SECONDS):
            self._shown = now
            self._bars.refresh()
            if not drawn:
                left = next(task.time_remaining for task in self._bars.tasks if task.id == number)
                of = "" if total is None else f"/{total:.0f}"
                rest = "" if left is None else f"{duration(left)} left"
                words = f"{what}: {done:.0f}{of} {', '.join(filter(None, [text, rest]))}"
                self.note(words.rstrip())
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


def figures(*columns: str, **options: Any) -> Table:
    """Return a table of numbers."""
    table = Table(**options)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def drawn_tree(
    paths: Sequence[Sequence[int]], chances: Mapping[tuple[int, ...], float] | None = None
) -> Tree:
    """A draft tree as text, children by rank, with the ``chances`` of nodes."""
    drawn: dict[tuple[int, ...], Tree] = {(): Tree("root")}
    for path in sorted(map(tuple, paths)):  # parents first
        share = "" if chances is None else f"  {100 * chances[path]:.1f} %"
        drawn[path] = drawn[path[:-1]].add(f"{path[-1]}{share}")
    return drawn[()]


def stdout_console() -> Console:
    """Standard output, 120 columns wide for a file or pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)
