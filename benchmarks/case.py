"""A benchmark case: a function of typed options that yields rows, for `benchmarks.runner`.

A row has numbers only if the measured result was verified: an engine's tokens against plain
vLLM's, a kernel's output against its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_medusa.job import Progress
from vllm_medusa.options import Options

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Row:
    """The result of one arm or one shape."""

    what: Mapping[str, Any]  # identifies it; always shown
    numbers: Mapping[str, Any] = field(default_factory=dict)  # shown only if ``right``
    right: bool = False  # its result was verified
    failed: str = ""  # the reason for missing numbers
    note: str = ""  # the reason if they are missing by design

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.note:
            return {**self.what, "note": self.note}
        if self.failed or not self.right:
            return {**self.what, "failed": self.failed or "wrong result"}
        return {**self.what, **self.numbers}


def attempt(what: Mapping[str, Any], measure: Callable[[], Row]) -> Row:
    """The row of ``measure``, or one with the error that it raised."""
    try:
        return measure()
    except Exception as error:
        return Row(what, failed=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Plot:
    """A plot: panels of ``ys`` by ``x``, a line for each ``series``; keys of rows.

    Error bars are ``{y}_quartiles`` ([lower, upper]) or ``{y}_error``. If all rows have the same
    ``x``, a bar chart is drawn instead.
    """

    x: str
    ys: tuple[str, ...]
    series: tuple[str, ...] = ("arm",)
    log: bool = True  # x on a logarithmic scale


@dataclass(frozen=True)
class Case:
    """A benchmark."""

    options: type[Options]  # defines the command line
    run: Callable[[Any, Progress], Iterator[Row]]  # yields rows as they are measured
    columns: Mapping[str, tuple[str, str]]  # key of a row -> (title, format of the value)
    quick: Mapping[str, Any] = field(default_factory=dict)  # other defaults with --quick
    plot: Plot | None = None
    text: Callable[[list[dict[str, Any]]], str] = lambda rows: ""  # below the table


def titled(keys: str, format_: str = "") -> dict[str, tuple[str, str]]:
    """Columns of one format whose titles are their keys, "_" replaced by a space."""
    return {key: (key.replace("_", " "), format_) for key in keys.split()}
