"""Prompts from text, JSON-lines and Parquet files, one row at a time.

A row is a *completion*, which continues a text as it stands, or a *conversation*, a list of
messages that is rendered with the tokenizer's chat template where it has one. What it may hold:

==========  ==========================  =========================================================
key         value                       meaning
==========  ==========================  =========================================================
prompt      text                        a completion
messages    [{"role", "content"}, ...]  a conversation; the model writes the next message
turns       [text, ...]                 a conversation of user turns (Spec-Bench's format): each
                                        answer is part of the prompt of the turn after it
==========  ==========================  =========================================================

Records of `vllm-medusa distill` are prompts too: the token ids before the first span that the
target wrote. A row may have its own name in ``request_id``, ``id`` or ``question_id``;
otherwise that is its index. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_medusa.job import SILENT, Progress, plural

T = TypeVar("T")

CONTENT_KEYS = ("prompt", "messages", "turns")
ID_KEYS = ("request_id", "id", "question_id")
_SHOWN_BAD_LINES = 20
_SHORT = 8  # tokens; a record whose first span starts before that has no prompt of its own
_TEXT_PROMPT = 32  # tokens of such a text that become the prompt
_TEXT, _JSON, _PARQUET = (".txt", ".text"), (".jsonl", ".ndjson"), (".parquet", ".pq")


class PromptError(ValueError):
    """A file of prompts or records, or one of its lines, that can't be used."""


def _characters(text: str) -> str:
    """JSON can escape halves of surrogate pairs; no tokenizer and no file takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!a} is half of a surrogate pair, which is no character") from None
    return text


def _filled(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


Text = Annotated[str, AfterValidator(_characters)]
Filled = Annotated[Text, AfterValidator(_filled)]
Message = dict[str, str]  # of "role" and "content"


class Written(BaseModel):
    """Of a record: token ids, and the spans that the target wrote."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    token_ids: Annotated[list[int], Field(min_length=1)]
    generated: list[Annotated[list[int], Field(min_length=2, max_length=2)]]


class _Message(BaseModel):
    role: Text
    content: Text


TEXT = TypeAdapter(Filled)
_NAME = TypeAdapter(Text)
MESSAGES = TypeAdapter(Annotated[list[_Message], Field(min_length=1)])
_TURNS = TypeAdapter(list[Filled])
_WRITTEN = TypeAdapter(Written)


@dataclass(frozen=True)
class Prompt:
    """One usable row: exactly one of ``text``, ``token_ids`` and ``turns`` is set."""

    index: int  # among the file's rows from 0, bad ones included, blank lines not
    line: int  # of a text file, or the row of a table, from 1
    request_id: str
    text: str | None = None  # a completion
    history: tuple[Message, ...] = ()  # before the turns
    turns: tuple[str, ...] = ()  # a conversation
    token_ids: tuple[int, ...] = ()  # a completion, tokenized: a record's


@dataclass(frozen=True)
class BadLine:
    """An invalid row, with the reason."""

    index: int
    line: int
    reason: str


def read_prompts(path: Path, column: str | None = None) -> Iterator[Prompt | BadLine]:
    """Yield every row of a prompt file, bad ones as ``BadLine``, in the file's order.

    The value of ``column`` may be a text, a list of texts (turns) or a list of messages; None: the
    first of ``CONTENT_KEYS`` that a row has.

    Raises PromptError: the file as a whole can't be read, or its suffix is unknown.
    """
    require_file(path, "prompts")
    suffix = path.suffix.lower()
    if suffix in _TEXT:
        if column is not None:
            raise PromptError(f"a column ({column!r}) was named, but {path} is a text file.")
        yield from read_rows(lines(path), lambda raw, i, n: Prompt(i, n, str(i), decoded(raw)))
    elif suffix in _JSON:
        yield from read_rows(lines(path), lambda raw, i, n: _from_row(parsed(raw), i, n, column))
    elif suffix in _PARQUET:
        yield from read_rows(_tables(path), lambda row, i, n: _from_row(row, i, n, column))
    else:
        known = ", ".join(_TEXT + _JSON + _PARQUET)
        raise PromptError(f"{path}: the suffix {suffix!r} is unknown; rename the file to {known}.")


def require_file(path: Path, what: str) -> None:
    """Refuse what is not a file that can be read; ``what`` it should hold.

    Raises PromptError: there is none, or a folder.
    """
    if not path.is_file():
        found = "a folder, not a file" if path.is_dir() else "no such file"
        raise PromptError(f"{path}: {found}. Give the path of a file of {what}.")


def read_rows(
    rows: Iterable[tuple[int, Any]],  # with the numbers of their lines
    parse: Callable[[Any, int, int], T],  # gets a row, its index, its line
) -> Iterator[T | BadLine]:
    """Parse rows; those for which ``parse`` raises `PromptError` come as ``BadLine``."""
    for index, (line, row) in enumerate(rows):
        try:
            yield parse(row, index, line)
        except PromptError as error:
            yield BadLine(index, line, str(error))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        yield from ((line, raw) for line, raw in enumerate(file, start=1) if raw.strip())


def decoded(raw: bytes) -> str:
    """A line of UTF-8 without its end. Raises PromptError: it is something else."""
    try:
        return raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None


def parsed(raw: bytes) -> Any:
    """The value of a line of JSON. Raises PromptError: it is something else."""
    text = decoded(raw)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not JSON: {error}") from None


def _tables(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a Parquet file, with their numbers from 1."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise PromptError(
            f"{path}: reading Parquet needs pyarrow; pip install 'vllm-medusa[parquet]'."
        ) from None
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (arrow.ArrowInvalid, OSError) as error:
        raise PromptError(f"{path}: not a Parquet file ({error}).") from None


def load_prompts(
    path: Path,
    column: str | None = None,
    on_bad_line: str = "refuse",
    progress: Progress = SILENT,
) -> list[Prompt]:
    """Read a whole file of prompts; see `read_prompts` and `settle_bad_lines`.

    Raises PromptError: the file can't be read, has bad lines that are not to be skipped, or nothing
    else.
    """
    prompts, bad = partition(read_prompts(path, column))
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
    """Refuse a file with bad lines, or, where ``on_bad_line`` is "skip", report them.

    Raises PromptError: naming the first of them.
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


def validated(kind: TypeAdapter[Any], value: Any, *name: str) -> Any:
    """A value of a row, checked. Raises PromptError: where it is wrong, and how."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        where, found = "".join((*name, place)).lstrip("."), repr(first["input"])
        found = found if len(found) <= 60 else found[:57] + "..."
        reason = first["msg"].removeprefix("Value error, ")
        raise PromptError(f"{where} is {found}: {reason}") from None


def row_name(row: Any, index: int) -> str:
    """The name of a row that is an object. Raises PromptError: it is none."""
    if not isinstance(row, Mapping):
        raise PromptError(f"a {type(row).__name__} instead of an object")
    name = str(next((row[key] for key in ID_KEYS if row.get(key) is not None), index))
    return validated(_NAME, name, "the name")


def first_key(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of the keys that a row has. Raises PromptError: it has none."""
    if found := next((key for key in keys if row.get(key) is not None), None):
        return found
    wanted = " or ".join(map(repr, keys))
    raise PromptError(f"no key {wanted}; the keys are {', '.join(map(repr, row)) or 'none'}")


def _from_row(row: Any, index: int, line: int, column: str | None) -> Prompt:
    name = row_name(row, index)
    if "generated" in row and column is None:
        written = validated(_WRITTEN, row)
        ids, start = written.token_ids, next(iter(written.generated), (0, 0))[0]
        if start < _SHORT:
            start = min(_TEXT_PROMPT, max(1, len(ids) // 2))
        return Prompt(index, line, f"line {line}", token_ids=tuple(ids[:start]))
    key = first_key(row, (column,) if column else CONTENT_KEYS)
    value = row[key]
    if isinstance(value, str) and key not in ("messages", "turns"):
        return Prompt(index, line, name, text=validated(TEXT, value, key))
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return Prompt(index, line, name, turns=tuple(validated(_TURNS, value, key)))
    *history, last = (message.model_dump() for message in validated(MESSAGES, value, key))
    if last["role"] != "user":
        raise PromptError(f"the last of {key} is by {last['role']!r}; it must be 'user'")
    return Prompt(index, line, name, history=tuple(history), turns=(last["content"],))
