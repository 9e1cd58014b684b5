"""What a benchmark is: a function of typed options that yields rows, for `benchmarks.runner`.

No number without a right result: a row keeps its numbers only if what they were measured on was
checked (an arm's tokens against plain vLLM's, a kernel against its reference) and is right.
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
    """What one arm or one shape gave."""

    what: Mapping[str, Any]  # names it; always shown
    numbers: Mapping[str, Any] = field(default_factory=dict)  # shown only if ``right``
    right: bool = False  # its result was checked and is right
    failed: str = ""  # why there are no numbers
    note: str = ""  # why there are none by design

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.note:
            return {**self.what, "note": self.note}
        if self.failed or not self.right:
            return {**self.what, "failed": self.failed or "its result is wrong"}
        return {**self.what, **self.numbers}


def attempt(what: Mapping[str, Any], measure: Callable[[], Row]) -> Row:
    """The row of ``measure``, or one with the reason why there is none: the others go on."""
    try:
        return measure()
    except Exception as error:
        return Row(what, failed=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Case:
    """A benchmark."""

    options: type[Options]  # its options; the command line is made of them
    run: Callable[[Any, Progress], Iterator[Row]]  # yields rows as they are found
    columns: Mapping[str, tuple[str, str]]  # key of a row -> (title, format of the value)
    quick: Mapping[str, Any] = field(default_factory=dict)  # other defaults with --quick
    bars: tuple[str, ...] = ()  # keys that are drawn, a panel each
    picture: Callable[[list[dict[str, Any]], Path], None] | None = None  # in place of bars
    text: Callable[[list[dict[str, Any]]], str] = lambda rows: ""  # under the table


def titled(keys: str, form: str = "") -> dict[str, tuple[str, str]]:
    """Columns whose titles are their keys, "_" for a space; all of one format."""
    return {key: (key.replace("_", " "), form) for key in keys.split()}
