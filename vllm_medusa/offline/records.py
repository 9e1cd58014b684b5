"""Training texts as token ids, with the spans that the target (or an assistant) wrote.

A file of records is JSON lines; a line is one of these:

=================  =========================================  =================================
key                value                                      what is trained
=================  =========================================  =================================
``token_ids``      token ids, with ``generated``: [[s, e)...] the spans; `vllm-medusa distill`'s
``messages``       [{"role", "content"}, ...]                 the assistant's turns
``conversations``  [{"from", "value"}, ...] (ShareGPT)        the assistant's turns
``text``           text                                       all of it but the first token
=================  =========================================  =================================

Texts and conversations need the target's tokenizer (`vllm_medusa.offline.conversations`). The
lines of a distilled file are in the order in which they were finished, which differs from run to
run: `load_records` and `split_heldout` return records in an order that depends on them alone.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, TypeAdapter

from vllm_medusa.files import new_file
from vllm_medusa.job import plural
from vllm_medusa.offline.conversations import CONVERSATION_KEYS, encode_conversation, encode_text
from vllm_medusa.offline.prompts import (
    BadLine,
    PromptError,
    Written,
    first_key,
    lines,
    parsed,
    partition,
    read_rows,
    require_file,
    row_name,
    validated,
)

Span = tuple[int, int]
_LARGEST_VOCABULARY = 1 << 31


@dataclass(frozen=True)
class Record:
    """One text."""

    index: int
    line: int
    request_id: str
    token_ids: tuple[int, ...]
    generated: tuple[Span, ...]  # [start, end) that the target wrote: sorted, disjoint, not empty
    temperature: float | None = None  # they were sampled at; None: not by the target
    top_p: float | None = None  # where these had cut the distribution
    top_k: int | None = None
    group: str | None = None  # the `key_of` the prompt that `distill` wrote the text for

    @property
    def truncated(self) -> bool:
        """Whether the text was not drawn from the whole distribution."""
        return self.top_p is not None or self.top_k is not None

    @property
    def num_generated(self) -> int:
        """Tokens in the spans."""
        return sum(end - start for start, end in self.generated)

    @property
    def prompt_key(self) -> str:
        """The key of splits: the ``group``, else the `key_of` the tokens before the first span.

        It is equal for all samples of one prompt.
        """
        return self.group or key_of(self.token_ids, self.generated[0][0])

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the index, then (in joined files) the content."""
        return (self.index, self.request_id, self.token_ids)

    def to_row(self) -> dict[str, Any]:
        """JSON that `read_records` reads back as the same record, except ``line``."""
        row = {
            "index": self.index,
            "request_id": self.request_id,
            "token_ids": self.token_ids,
            "generated": self.generated,
            "temperature": self.temperature,
        }
        more = {"top_p": self.top_p, "top_k": self.top_k, "group": self.group}
        return row | {key: value for key, value in more.items() if value is not None}


def key_of(token_ids: Sequence[int], prompt_length: int) -> str:
    """A digest of a text's prompt; of plain texts, which have none, it covers all tokens."""
    end = prompt_length if prompt_length > 1 else len(token_ids)
    return hashlib.sha256(array("q", token_ids[:end]).tobytes()).hexdigest()


def read_records(
    path: Path,
    tokenizer: Any = None,
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,  # longer records are refused; None: none is
) -> Iterator[Record | BadLine]:
    """Yield every line of a file of records, those that can't be used as ``BadLine``.

    Without the target's ``tokenizer`` texts and conversations are bad lines. Token ids from
    ``vocab_size`` on are refused; None: from as many as the tokenizer knows, if there is one.

    Raises:
        PromptError: there is no such file.

    """
    require_file(path, "records")
    limit = _LARGEST_VOCABULARY if tokenizer is None else len(tokenizer)

    def parse(raw: bytes, index: int, line: int) -> Record:
        record = _from_row(parsed(raw), index, line, tokenizer)
        _check(record, limit if vocab_size is None else vocab_size)
        if max_tokens is not None and len(record.token_ids) > max_tokens:
            raise PromptError(f"{len(record.token_ids)} tokens; at most {max_tokens} are allowed")
        return record

    yield from read_rows(lines(path), parse)


def load_records(
    path: Path, tokenizer: Any = None, **limits: Any
) -> tuple[list[Record], list[BadLine]]:
    """Read a whole file; see `read_records`.

    Returns:
        The usable records, sorted so that the order of the file's lines makes no difference, and
        the bad lines.

    """
    records, bad = partition(read_records(path, tokenizer, **limits))
    return sorted(records, key=lambda r: r.order), bad


def digest_of(records: Iterable[Record]) -> str:
    """SHA-256 of all that training takes from records, in their order, in hexadecimal."""
    digest = hashlib.sha256()
    for record in records:
        spans = [edge for span in record.generated for edge in span]
        sizes = (len(record.token_ids), len(spans))
        digest.update(array("q", (*sizes, *record.token_ids, *spans)).tobytes())
        digest.update(f"{record.temperature}\n".encode())
    return digest.hexdigest()


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write records as `read_records` reads them; an old file is replaced as a whole."""
    with new_file(path) as file:
        for record in records:
            file.write(json.dumps(record.to_row()) + "\n")


def split_heldout(records: Iterable[Record], share: float) -> tuple[list[Record], list[Record]]:
    """Hold out ``share`` of the prompts, in [0, 1), with all their samples.

    Which ones depends on the prompts' contents alone, and two shares of the same records are
    nested. A share above 0 holds out at least one prompt.

    Returns:
        The records to train on and those held out, each sorted by index.

    Raises:
        ValueError: the share is out of bounds, or there are too few prompts to leave some on both
            sides.

    """
    if not 0 <= share < 1:
        raise ValueError(f"the held-out share is {share}; it must be at least 0 and below 1.")
    keyed = sorted(((r.prompt_key, r) for r in records), key=lambda pair: pair[1].order)
    if not share:
        return [record for _, record in keyed], []
    keys = sorted({key for key, _ in keyed})
    if len(keys) < 2:
        raise ValueError(
            f"nothing can be held out of {len(keyed)} records of {plural(len(keys), 'prompt')}; "
            "bring more prompts, or a file of held-out records."
        )
    count = min(len(keys) - 1, max(1, round(share * len(keys))))
    chosen = set(keys[:count])
    train = [record for key, record in keyed if key not in chosen]
    return train, [record for key, record in keyed if key in chosen]


class _Row(Written):
    """A line of `vllm-medusa distill`."""

    index: NonNegativeInt | None = None
    temperature: NonNegativeFloat | None = None
    top_p: float | None = None
    top_k: int | None = None
    group: Annotated[str, Field(min_length=1)] | None = None


_ROW = TypeAdapter(_Row)


def _from_row(row: Any, index: int, line: int, tokenizer: Any) -> Record:
    name = row_name(row, index)
    if "error" in row:
        raise PromptError(f"no record, but an error: {row['error']}")
    key = first_key(row, ("token_ids", *CONVERSATION_KEYS, "text"))
    if key == "token_ids":
        if "generated" not in row:
            raise PromptError(
                "no key 'generated', the spans that the target wrote; results of "
                "`vllm-medusa generate` lack their prompts: `vllm-medusa distill` writes records"
            )
        found = dict(validated(_ROW, dict(row)))
        ids = tuple(found.pop("token_ids"))
        spans = tuple((start, end) for start, end in found.pop("generated"))
        own = found.pop("index")
        return Record(index if own is None else own, line, name, ids, spans, **found)
    if tokenizer is None:
        raise PromptError(f"{key!r} needs the target's tokenizer, and none was given")
    if key == "text":
        ids, spans = encode_text(row[key], tokenizer)
    else:
        ids, spans = encode_conversation(row[key], key, tokenizer)
    return Record(index, line, name, ids, spans)


def _check(record: Record, limit: int) -> None:
    """Refuse token ids outside the vocabulary, and spans that are not as `Record` has them."""
    ids, before = record.token_ids, 0
    if wrong := [(place, token) for place, token in enumerate(ids) if not 0 <= token < limit]:
        raise PromptError(
            f"token_ids[{wrong[0][0]}] is {wrong[0][1]}, outside the vocabulary (from 0 to "
            f"{limit - 1}); was the record made with another target?"
        )
    if not record.generated:
        raise PromptError("no generated span: there is nothing to train on")
    for start, end in record.generated:
        if not before <= start < end <= len(ids):
            raise PromptError(
                f"the generated span [{start}, {end}) is empty, overlaps the one before or is "
                f"outside the {len(ids)} tokens"
            )
        before = end
