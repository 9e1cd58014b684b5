"""Prompts as token ids, from any JSON-lines file that `vllm_medusa.offline.prompts` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_medusa.offline.prompts import BadLine, PromptError, read_prompts


def load_prompts(
    path: Path, tokenizer: Any, skip: int, limit: int, max_tokens: int
) -> list[list[int]]:
    """Reads prompts `skip` to `skip + limit`; of a dialogue only the first turn.

    Every prompt begins with the start-of-text token, if there is one; longer prompts lose what
    follows it. A chat template, where the tokenizer has one, is applied to dialogues.

    Raises:
        PromptError: a record can't be used or there are no prompts.

    """
    prompts: list[list[int]] = []
    for record in read_prompts(path):
        if isinstance(record, BadLine):
            raise PromptError(f"{path}, line {record.line}: {record.reason}")
        if record.text is not None:
            ids = tokenizer(record.text).input_ids
        elif tokenizer.chat_template:
            messages = [*record.history, {"role": "user", "content": record.turns[0]}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            ids = tokenizer(record.turns[0]).input_ids
        start = tokenizer.bos_token_id
        if start is not None and ids[0] != start:
            ids = [start, *ids]
        if len(ids) > max_tokens:
            ids = ids[:1] + ids[len(ids) - max_tokens + 1 :]
        prompts.append(list(ids))
    chosen = prompts[skip : skip + limit]
    if not chosen:
        raise PromptError(f"{path} has {len(prompts)} prompts: none is left after skipping {skip}")
    return chosen
