"""Progress over the prompts of a job."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 10.0


class PromptProgress:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, console: Console, total: int, done: int):
        self.console, self.total, self.done = console, total, done
        self.last = time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("generating", total=total, completed=done)

    def __enter__(self) -> PromptProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, rate: float, tau: float | None) -> None:
        """One more prompt is done."""
        self.done += 1
        text = f"{rate:.0f} tok/s" + (f", tau {tau:.2f}" if tau else "")
        self.bar.update(self.task, completed=self.done, description=text)
        now = time.perf_counter()
        if not self.console.is_terminal and now - self.last > _PLAIN_SECONDS:
            self.last = now
            self.console.print(f"{self.done}/{self.total} prompts, {text}")
