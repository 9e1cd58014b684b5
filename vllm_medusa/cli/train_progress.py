"""Progress over the steps of a training run, and its result as a table."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_PLAIN_SECONDS = 10.0


class StepProgress:
    """A bar on a terminal; elsewhere a line every few seconds."""

    def __init__(self, console: Console, name: str, total: int | None = None) -> None:
        self.console, self.name, self.total = console, name, total
        self.last = time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=total)

    def __enter__(self) -> StepProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """So much is done; ``text`` says how it goes."""
        self.total = total or self.total
        self.bar.update(
            self.task, completed=done, total=self.total, description=f"{self.name} {text}".strip()
        )
        now = time.perf_counter()
        if not self.console.is_terminal and now - self.last > _PLAIN_SECONDS:
            self.last = now
            self.console.print(f"{self.name}: {done}/{self.total} {text}", soft_wrap=True)


def line_of(entry: dict[str, Any]) -> str:
    """A line of the log in a few words."""
    if "heldout" in entry:
        best = " ".join(f"{top[0]:.3f}" for top in entry["heldout"]["top"])
        return f"held-out top 1: {best}"
    return "loss " + " ".join(f"{loss:.2f}" for loss in entry["losses"])


def accuracy_table(heldout: dict[str, Any]) -> Table:
    """Held-out loss and accuracies, one row a head."""
    table = Table(title=f"held out, {heldout['labels']} labels")
    ranks = (1, 2, 3, 5, 10)
    for name in ("head", "loss", *(f"top {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    for head, (loss, top) in enumerate(zip(heldout["loss"], heldout["top"], strict=True)):
        table.add_row(str(head), f"{loss:.3f}", *(f"{top[rank - 1]:.1%}" for rank in ranks))
    return table
