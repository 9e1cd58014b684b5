"""Prompts to decode from, as token ids, of a file of prompts or of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_medusa.offline.prompts import BadLine, PromptError, read_prompts


def prompt_ids(path: Path, tokenizer: Any, limit: int | None = None) -> list[list[int]]:
    """Read up to ``limit`` different prompts.

    Of a record (``token_ids`` and ``generated``) it is what stands before the first generated span.
    Dialogues go through the tokenizer's chat template, if it has one; of several turns the first
    one is asked.

    Raises:
        PromptError: a line can't be used, or there is none.

    """
    found = _of_records(path) if _holds_records(path) else _of_prompts(path, tokenizer)
    distinct = list(dict.fromkeys(tuple(ids) for ids in found if ids))
    if not distinct:
        raise PromptError(f"{path}: no prompts in it.")
    return [list(ids) for ids in distinct[:limit]]


def _holds_records(path: Path) -> bool:
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.strip()), "")
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and "token_ids" in row and "generated" in row


def _of_records(path: Path) -> list[list[int]]:
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                found.append([int(token) for token in row["token_ids"][: row["generated"][0][0]]])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise PromptError(f"{path}, line {number}: no record ({error!r}).") from None
    return found


def _of_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    found = []
    for record in read_prompts(path):
        if isinstance(record, BadLine):
            raise PromptError(f"{path}, line {record.line}: {record.reason}")
        if record.text is not None:
            ids = tokenizer(record.text).input_ids
        elif getattr(tokenizer, "chat_template", None):
            messages = [*record.history, {"role": "user", "content": record.turns[0]}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            texts = [message["content"] for message in record.history]
            ids = tokenizer("".join([*texts, record.turns[0]])).input_ids
        found.append(list(ids))
    return found
