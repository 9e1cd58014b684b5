"""Prompts from text, JSON-lines and Parquet files, one record at a time.

A record is a *completion*, which continues a text unchanged, or a *conversation*, a list of
messages that is rendered with the tokenizer's chat template if there is one. Keys of a row:

==========  ==========================  =========================================================
key         value                       meaning
==========  ==========================  =========================================================
prompt      text                        a completion
messages    [{"role", "content"}, ...]  a conversation; the model generates the next message
turns       [text, ...]                 a conversation of user turns (Spec-Bench's format): each
                                        answer is part of the prompt of the turn after it
==========  ==========================  =========================================================

Records of `vllm-medusa distill` are prompts too: the token ids before the first generated
span. A row may have a name in ``request_id``, ``id`` or ``question_id``;
the default is its index. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_medusa.job import SILENT, Progress, plural

Message = dict[str, str]
T = TypeVar("T")

CONTENT_KEYS = ("prompt", "messages", "turns")
ID_KEYS = ("request_id", "id", "question_id")
_SHOWN_BAD_LINES = 20
_SHORT = 8  # tokens; a record whose first span starts earlier has no prompt
_TEXT_PROMPT = 32  # tokens of such a text to use as the prompt
_SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


class PromptError(ValueError):
    """An invalid file of prompts or records, or an invalid line of one."""


@dataclass(frozen=True)
class Prompt:
    """One valid record: exactly one of ``text``, ``token_ids`` and ``turns`` is set."""

    index: int  # record index in the file from 0, counting bad lines but not blank ones
    line: int  # line of a text file, or row of a table, from 1
    request_id: str
    text: str | None = None  # a completion
    history: tuple[Message, ...] = ()  # messages before the turns
    turns: tuple[str, ...] = ()  # a conversation
    token_ids: tuple[int, ...] = ()  # a tokenized completion, from a record


@dataclass(frozen=True)
class BadLine:
    """An invalid record, with the reason."""

    index: int
    line: int
    reason: str


def read_prompts(path: Path, column: str | None = None) -> Iterator[Prompt | BadLine]:
    """Yield every record of a prompt file, bad ones as ``BadLine``, in file order.

    The value of ``column`` may be a string, a list of strings (turns) or a list of messages; None:
    the first of ``CONTENT_KEYS`` that a row has.

    Raises PromptError: the file is unreadable, or its suffix is unknown.
    """
    require_file(path, "prompts")
    kind = _SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise PromptError(
            f"{path}: the suffix {path.suffix!r} is unknown; rename the file to one "
            f"of {', '.join(sorted(_SUFFIXES))}."
        )
    if kind == "text" and column is not None:
        raise PromptError(f"--column {column!r} does not apply to the text file {path}: omit it.")

    def parse(text: str, index: int, line: int) -> Prompt:
        if kind == "text":
            return Prompt(index, line, str(index), text=text)
        return _from_row(parse_json(text), index, line, column)

    yield from _read_parquet(path, column) if kind == "parquet" else read_lines(path, parse)


def require_file(path: Path, what: str) -> None:
    """Refuse a path that is not a file; ``what`` describes its contents.

    Raises PromptError: it does not exist, or is a folder.
    """
    if not path.is_file():
        found = "a folder, not a file" if path.is_dir() else "no such file"
        raise PromptError(f"{path}: {found}. Pass a file of {what}.")


def read_lines(path: Path, parse: Callable[[str, int, int], T]) -> Iterator[T | BadLine]:
    """Parse a UTF-8 file line by line; blank lines are skipped, bad ones yield ``BadLine``.

    ``parse`` receives a line without its newline, its index among non-blank lines, and its number
    from 1; it raises `PromptError` for a bad line.
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
    """The value of a line of JSON. Raises PromptError: invalid JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # too many digits or levels
        raise PromptError(f"invalid JSON: {error}") from None


def load_prompts(
    path: Path,
    column: str | None = None,
    on_bad_line: str = "refuse",
    progress: Progress = SILENT,
) -> list[Prompt]:
    """Read a whole file of prompts; see `read_prompts` and `settle_bad_lines`.

    Raises PromptError: the file is unreadable, has bad lines without ``skip``, or has no valid
    ones.
    """
    prompts, bad = partition(read_prompts(path, column))
    settle_bad_lines(path, bad, on_bad_line, progress)
    if not prompts:
        raise PromptError(f"{path}: no prompts in it.")
    return prompts


def partition(rows: Iterable[T | BadLine]) -> tuple[list[T], list[BadLine]]:
    """Valid rows and bad lines, each in order."""
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
    """Refuse a file with bad lines, or report them if ``on_bad_line`` is "skip".

    Raises PromptError: with the first of them.
    """
    if not bad:
        return
    shown = [f"line {each.line}: {each.reason}" for each in bad[:_SHOWN_BAD_LINES]]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown)} more")
    count, lines = plural(len(bad), "bad line"), "\n  ".join(shown)
    if on_bad_line == "refuse":
        raise PromptError(f"{path}: {count}; correct them, or pass --on-bad-line skip.\n  {lines}")
    progress.note(f"skipping {count}:\n  {lines}")


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
            f"{', '.join(map(repr, names))}. Set --column to the one with the prompts."
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


def _from_record(row: Mapping[str, Any], index: int, line: int) -> Prompt:
    """The tokens before the first generated span; for plain texts, the beginning."""
    try:
        ids, start = tuple(map(int, row["token_ids"])), int(row["generated"][0][0])
    except (KeyError, IndexError, TypeError, ValueError):
        raise PromptError("not a record: it needs 'token_ids' and 'generated' spans") from None
    if start < _SHORT:
        start = min(_TEXT_PROMPT, max(1, len(ids) // 2))
    return Prompt(index, line, f"line {line}", token_ids=ids[:start])


def require_characters(*texts: str) -> None:
    """Refuse lone surrogates: JSON can escape them, but tokenizers and files can't represent them.

    Raises PromptError: there is one.
    """
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"holds {error.object[error.start]!a}, half of a surrogate pair, not a character"
        ) from None


def _from_row(row: Any, index: int, line: int, column: str | None) -> Prompt:
    if not isinstance(row, Mapping):
        raise PromptError(f"a {type(row).__name__} instead of an object with a 'prompt'")
    if "generated" in row and column is None:
        return _from_record(row, index, line)
    key = next((k for k in ((column,) if column else CONTENT_KEYS) if row.get(k) is not None), None)
    if key is None:
        wanted = repr(column) if column else " or ".join(map(repr, CONTENT_KEYS))
        raise PromptError(f"no key {wanted}; the keys are {', '.join(map(repr, row)) or 'none'}")
    value = row[key]
    name = str(next((row[k] for k in ID_KEYS if row.get(k) is not None), index))
    require_characters(name)
    if isinstance(value, str):
        if key in ("messages", "turns") and column is None:
            raise PromptError(f"{key!r} is a string; use a list, or the key 'prompt'")
        if not value:
            raise PromptError(f"{key!r} is empty")
        require_characters(value)
        return Prompt(index, line, name, text=value)
    if not isinstance(value, list) or not value:
        raise PromptError(f"{key!r} is {short(value)}; use a non-empty string or list")
    if all(isinstance(turn, str) for turn in value):
        if not all(value):
            raise PromptError(f"{key!r} has an empty turn")
        require_characters(*value)
        return Prompt(index, line, name, turns=tuple(value))
    messages = tuple(read_message(m, key) for m in value)
    require_characters(*(message["content"] for message in messages))
    if messages[-1]["role"] != "user":
        raise PromptError(f"the last of {key!r} is by {messages[-1]['role']!r}; it must be 'user'")
    return Prompt(index, line, name, history=messages[:-1], turns=(messages[-1]["content"],))


def read_message(value: Any, key: str) -> Message:
    """Return a ``{"role", "content"}`` object of the list ``key``, other keys dropped.

    Raises PromptError: it is not such an object.
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
    """A value for a message, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
