"""Prompts to decode from, as token ids, of a file of prompts or of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_medusa.offline.prompts import BadLine, Prompt, PromptError, read_prompts
from vllm_medusa.offline.records import Record, read_records


def prompt_ids(path: Path, tokenizer: Any, limit: int | None = None) -> list[list[int]]:
    """Read up to ``limit`` different prompts.

    Of a record (``token_ids`` and ``generated``) it is what stands before the first generated span.
    Dialogues go through the tokenizer's chat template, if it has one; of several turns the first
    one is asked.

    Raises:
        PromptError: a line can't be used, or there is none.

    """
    found = []
    for row in read_records(path) if _holds_records(path) else read_prompts(path):
        if isinstance(row, BadLine):
            raise PromptError(f"{path}, line {row.line}: {row.reason}")
        if isinstance(row, Record):
            found.append(row.token_ids[: row.generated[0][0]])
        else:
            found.append(tuple(_encode(row, tokenizer)))
    distinct = [list(ids) for ids in dict.fromkeys(found) if ids]
    if not distinct:
        raise PromptError(f"{path}: no prompts in it.")
    return distinct[:limit]


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


def _encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.text is not None:
        text = prompt.text
    elif getattr(tokenizer, "chat_template", None):
        messages = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )
    else:
        text = "".join([*(message["content"] for message in prompt.history), prompt.turns[0]])
    return list(tokenizer(text).input_ids)
