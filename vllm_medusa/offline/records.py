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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
)

from vllm_medusa.files import new_file
from vllm_medusa.job import plural
from vllm_medusa.offline.conversations import CONVERSATION_KEYS, encode_conversation, encode_text
from vllm_medusa.offline.prompts import (
    ID_KEYS,
    BadLine,
    PromptError,
    parse_json,
    partition,
    read_lines,
    require_characters,
    require_file,
    short,
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
    min_generated: int = 1,  # records with fewer tokens in their spans are refused
) -> Iterator[Record | BadLine]:
    """Yield every line of a file of records, those that can't be used as ``BadLine``.

    Without the target's ``tokenizer`` texts and conversations are bad lines. Token ids from
    ``vocab_size`` on are refused; None: from as many as the tokenizer knows, if there is one.

    Raises:
        PromptError: there is no such file.

    """
    require_file(path, "records")
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)

    def parse(text: str, index: int, line: int) -> Record:
        record = _from_row(parse_json(text), index, line, tokenizer)
        _check(record.token_ids, record.generated, vocab_size)
        if max_tokens is not None and len(record.token_ids) > max_tokens:
            raise PromptError(f"{len(record.token_ids)} tokens; at most {max_tokens} are allowed")
        if record.num_generated < min_generated:
            raise PromptError(
                f"{record.num_generated} generated tokens; at least {min_generated} are needed"
            )
        return record

    yield from read_lines(Path(path), parse)


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


def _from_row(row: Any, index: int, line: int, tokenizer: Any) -> Record:
    if not isinstance(row, Mapping):
        raise PromptError(f"a {type(row).__name__} instead of an object with 'token_ids'")
    name = str(next((row[k] for k in ID_KEYS if row.get(k) is not None), index))
    require_characters(name)
    if "token_ids" in row:
        return _from_ids(row, index, line, name)
    if "error" in row:
        raise PromptError(f"no record, but an error: {row['error']}")
    key = next((k for k in (*CONVERSATION_KEYS, "text") if row.get(k) is not None), None)
    if key is None:
        raise PromptError(
            "no key 'token_ids', 'messages', 'conversations' or 'text'; the keys are "
            f"{', '.join(map(repr, row)) or 'none'}. `vllm-medusa distill` lets the target answer "
            "prompts and writes such a file"
        )
    if tokenizer is None:
        raise PromptError(f"{key!r} needs the target's tokenizer, and none was given")
    if key == "text":
        ids, spans = encode_text(row[key], tokenizer)
    else:
        ids, spans = encode_conversation(row[key], key, tokenizer)
    return Record(index, line, name, ids, spans)


class _Row(BaseModel):
    """A line of `vllm-medusa distill`."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    index: NonNegativeInt | None = None
    token_ids: Annotated[list[int], Field(min_length=1)]
    generated: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    temperature: NonNegativeFloat | None = None
    top_p: float | None = None
    top_k: int | None = None
    group: Annotated[str, Field(min_length=1)] | None = None


def _from_ids(row: Mapping[str, Any], index: int, line: int, name: str) -> Record:
    if "generated" not in row:
        raise PromptError(
            "no key 'generated', the spans that the target wrote; results of "
            "`vllm-medusa generate` lack their prompts: `vllm-medusa distill` writes records"
        )
    try:
        found = _Row.model_validate(dict(row))
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{at}]" if isinstance(at, int) else f"{at}" for at in first["loc"])
        raise PromptError(f"{where} is {short(first['input'])}: {first['msg']}") from None
    return Record(
        index if found.index is None else found.index,
        line,
        name,
        tuple(found.token_ids),
        tuple((start, end) for start, end in found.generated),
        found.temperature,
        found.top_p,
        found.top_k,
        found.group,
    )


def _check(ids: tuple[int, ...], spans: tuple[Span, ...], vocab_size: int | None) -> None:
    limit = _LARGEST_VOCABULARY if vocab_size is None else vocab_size
    if min(ids) < 0 or max(ids) >= limit:
        place, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limit)
        raise PromptError(
            f"token_ids[{place}] is {token}, outside the vocabulary (from 0 to {limit - 1}); "
            "was the record made with another target?"
        )
    if not spans:
        raise PromptError("no generated span: there is nothing to train on")
    before = 0
    for start, end in spans:
        if not 0 <= start < end <= len(ids):
            raise PromptError(
                f"the generated span [{start}, {end}) is empty or outside the {len(ids)} tokens"
            )
        if start < before:
            raise PromptError(
                f"a generated span starts at {start}, before the last ended at {before}"
            )
        before = end
