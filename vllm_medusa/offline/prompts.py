"""Prompts from text, JSON-lines and Parquet files, one record at a time.

A record is one of two things. A *completion* continues a text as it stands. A *conversation* is a
list of messages, rendered with the tokenizer's chat template where it has one. What a row may hold:

==========  ==========================  =========================================================
key         value                       meaning
==========  ==========================  =========================================================
prompt      text                        a completion
messages    [{"role", "content"}, ...]  a conversation; the model writes the next message
turns       [text, ...]                 a conversation of user turns (Spec-Bench's format): each
                                        answer is part of the prompt of the turn after it
==========  ==========================  =========================================================

A row may name itself with ``request_id``, ``id`` or ``question_id``; otherwise its index is its
name. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_medusa.job import SILENT, Progress

Message = dict[str, str]
T = TypeVar("T")

FORMATS = ("text", "jsonl", "parquet")
CONTENT_KEYS = ("prompt", "messages", "turns")
ID_KEYS = ("request_id", "id", "question_id")
_SHOWN_BAD_LINES = 20
_SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


class PromptError(ValueError):
    """A file of prompts or records, or one of its lines, that can't be used."""


@dataclass(frozen=True)
class Prompt:
    """One usable record of a prompt file.

    ``index`` counts the file's records from 0, bad ones included, and blank lines not; ``line`` is
    the line of a text file or the row of a table, from 1. Exactly one of ``text`` (a completion),
    ``token_ids`` (the same, tokenized; no file of prompts has them) and ``turns`` (a conversation
    after the messages in ``history``) is set.
    """

    index: int
    line: int
    request_id: str
    text: str | None = None
    history: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class BadLine:
    """A record that can't be used, and why."""

    index: int
    line: int
    reason: str


def detect_format(path: Path) -> str:
    """Return the format that a file's suffix says.

    Raises:
        PromptError: there is no such file, or its suffix says nothing.

    """
    require_file(path, "prompts")
    try:
        return _SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise PromptError(
            f"{path}: the suffix {path.suffix!r} doesn't say the format; known are "
            f"{', '.join(sorted(_SUFFIXES))}. Name it with --format {{{','.join(FORMATS)}}}."
        ) from None


def read_prompts(
    path: Path, format: str = "auto", column: str | None = None
) -> Iterator[Prompt | BadLine]:
    """Yield every record of a prompt file, bad ones as ``BadLine``, in the file's order.

    The format "auto" goes by the suffix. The value of ``column`` may be a text, a list of texts
    (turns) or a list of messages; None: the first of ``CONTENT_KEYS`` that a row has.

    Raises:
        PromptError: the file as a whole can't be read.

    """
    kind = detect_format(path) if format == "auto" else format
    if kind not in FORMATS:
        raise PromptError(f"format {format!r} is unknown; use one of auto, {', '.join(FORMATS)}.")
    require_file(path, "prompts")
    if kind == "parquet":
        yield from _read_parquet(path, column)
    else:
        yield from _read_lines(path, kind, column)


def require_file(path: Path, what: str) -> None:
    """Refuse what is not a file that can be read; ``what`` it should hold.

    Raises:
        PromptError: there is none, or a folder.

    """
    if not path.is_file():
        found = "a folder, not a file" if path.is_dir() else "no such file"
        raise PromptError(f"{path}: {found}. Give the path of a file of {what}.")


def read_lines(path: Path, parse: Callable[[str, int, int], T]) -> Iterator[T | BadLine]:
    """Parse a file line by line; blank lines are left out, bad ones come as ``BadLine``.

    The file is UTF-8, with or without a byte order mark. ``parse`` makes what is yielded of a line
    without its end, its index among those that aren't blank, and its number from 1; it raises
    `PromptError` for a bad line.
    """
    index = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")
                yield parse(text, index, line)
            except UnicodeDecodeError as error:
                yield BadLine(index, line, f"not UTF-8 text: {error.reason} at byte {error.start}")
            except PromptError as error:
                yield BadLine(index, line, str(error))
            index += 1


def parse_json(text: str) -> Any:
    """Return the value of a line of JSON.

    Raises:
        PromptError: it isn't JSON.

    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise PromptError(f"not JSON that can be read: {error}") from None


def _read_lines(path: Path, kind: str, column: str | None) -> Iterator[Prompt | BadLine]:
    if kind == "text" and column is not None:
        raise PromptError(f"a column ({column!r}) was named, but {path} is a text file: drop it.")

    def parse(text: str, index: int, line: int) -> Prompt:
        if kind == "text":
            return Prompt(index, line, str(index), text=text)
        return _from_row(parse_json(text), index, line, column)

    yield from read_lines(path, parse)


def load_prompts(
    path: Path,
    format: str = "auto",
    column: str | None = None,
    on_bad_line: str = "refuse",
    progress: Progress = SILENT,
) -> list[Prompt]:
    """Read a whole file of prompts; see `read_prompts` and `settle_bad_lines`.

    Raises:
        PromptError: the file can't be read, has bad lines that are not to be skipped, or nothing
            else.

    """
    prompts, bad = partition(read_prompts(path, format, column))
    settle_bad_lines(path, bad, on_bad_line, progress)
    if not prompts:
        raise PromptError(f"{path}: no prompts in it.")
    return prompts


def partition(rows: Iterable[T | BadLine]) -> tuple[list[T], list[BadLine]]:
    """Usable rows and bad lines, each in their order."""
    good: list[T] = []
    bad: list[BadLine] = []
    for row in rows:
        if isinstance(row, BadLine):
            bad.append(row)
        else:
            good.append(row)
    return good, bad


def settle_bad_lines(
    path: Path, bad: Sequence[BadLine], on_bad_line: str, progress: Progress
) -> None:
    """Refuse a file with bad lines, or, where ``on_bad_line`` is "skip", tell of them.

    Raises:
        PromptError: naming the first of them.

    """
    if not bad:
        return
    shown = [f"line {each.line}: {each.reason}" for each in bad[:_SHOWN_BAD_LINES]]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown)} more")
    if on_bad_line == "refuse":
        raise PromptError(
            f"{path}: {len(bad)} bad lines; mend them, or pass --on-bad-line skip.\n  "
            + "\n  ".join(shown)
        )
    progress.note(f"skipping {len(bad)} bad lines:\n  " + "\n  ".join(shown))


def _read_parquet(path: Path, column: str | None) -> Iterator[Prompt | BadLine]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise PromptError(
            f"{path}: reading Parquet needs pyarrow; pip install 'vllm-medusa[parquet]'."
        ) from None
    try:
        table = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise PromptError(f"{path}: not a Parquet file ({error}).") from None
    names = table.schema_arrow.names
    wanted = (column,) if column else CONTENT_KEYS
    if not any(name in names for name in wanted):
        raise PromptError(
            f"{path}: no column {' or '.join(map(repr, wanted))}; it has "
            f"{', '.join(map(repr, names))}. Name the one with the prompts with --column."
        )
    columns = [name for name in (*wanted, *ID_KEYS) if name in names]
    index = 0
    for batch in table.iter_batches(batch_size=1024, columns=columns):
        for row in batch.to_pylist():
            try:
                yield _from_row(row, index, index + 1, column)
            except PromptError as error:
                yield BadLine(index, index + 1, str(error))
            index += 1


def _from_row(row: Any, index: int, line: int, column: str | None) -> Prompt:
    prompt = _read_row(row, index, line, column)
    contents = [message["content"] for message in prompt.history]
    require_characters(prompt.request_id, prompt.text or "", *prompt.turns, *contents)
    return prompt


def require_characters(*texts: str) -> None:
    """Refuse halves of surrogate pairs: JSON can escape them; no tokenizer and no file takes them.

    Raises:
        PromptError: there is one.

    """
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"holds {error.object[error.start]!a}, half of a surrogate pair, which is no character"
        ) from None


def _read_row(row: Any, index: int, line: int, column: str | None) -> Prompt:
    if not isinstance(row, Mapping):
        raise PromptError(f"a {type(row).__name__} instead of an object with a 'prompt'")
    present = [k for k in ((column,) if column else CONTENT_KEYS) if row.get(k) is not None]
    if not present:
        wanted = repr(column) if column else " or ".join(map(repr, CONTENT_KEYS))
        raise PromptError(f"no key {wanted}; the keys are {', '.join(map(repr, row)) or 'none'}")
    key = present[0]
    value = row[key]
    name = next((row[k] for k in ID_KEYS if row.get(k) is not None), index)
    if isinstance(value, str):
        if key in ("messages", "turns") and column is None:
            raise PromptError(f"{key!r} is a text; use a list, or the key 'prompt'")
        if not value:
            raise PromptError(f"{key!r} is empty")
        return Prompt(index, line, str(name), text=value)
    if not isinstance(value, list) or not value:
        raise PromptError(f"{key!r} is {short(value)}; use a text or a list that isn't empty")
    if all(isinstance(turn, str) for turn in value):
        if not all(value):
            raise PromptError(f"{key!r} has an empty turn")
        return Prompt(index, line, str(name), turns=tuple(value))
    messages = tuple(read_message(m, key) for m in value)
    if messages[-1]["role"] != "user":
        raise PromptError(f"the last of {key!r} is by {messages[-1]['role']!r}; it must be 'user'")
    return Prompt(index, line, str(name), history=messages[:-1], turns=(messages[-1]["content"],))


def read_message(value: Any, key: str) -> Message:
    """Return a ``{"role", "content"}`` object of the list ``key``, other keys dropped.

    Raises:
        PromptError: it is something else.

    """
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("role"), str)
        or not isinstance(value.get("content"), str)
    ):
        raise PromptError(
            f"{key!r} holds {short(value)}; use {{'role': text, 'content': text}} objects"
        )
    return {"role": value["role"], "content": value["content"]}


def short(value: Any) -> str:
    """A value in a message, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
