"""Engine arguments for a job whose prompts are known: enough memory for it, and no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_medusa.offline.prompts import Prompt

_SLACK = 64  # tokens of a chat template around a message, positions of drafts
_GPU_SHARE = 0.84  # of its memory, for all engines together


def engine_arguments(
    target: str,  # folder or hub name
    prompts: Iterable[Prompt],  # of the job
    max_tokens: int,  # of each answer
    batch: int,  # prompts at a time
    max_model_len: int | None = None,  # where the user set one
    *,
    engines: int = 1,  # on this machine at the same time
) -> dict[str, Any]:
    """What engines are given unless the user says otherwise.

    On CPUs they run eagerly, which needs no compiler and starts in seconds, with a key-value cache
    for the job: vLLM would take half of the memory or more, and touch all of it. On a GPU several
    engines share its memory. Prompts are prefilled whole every time, so that rounds are alike.
    """
    import torch

    arguments: dict[str, Any] = {"enable_prefix_caching": False}
    if torch.accelerator.is_available():
        if engines > 1:
            arguments["gpu_memory_utilization"] = round(_GPU_SHARE / engines, 2)
        return arguments
    arguments["enforce_eager"] = True
    if max_model_len is None:
        longest = max(_bound(prompt, max_tokens) for prompt in prompts)
        arguments |= _small_cache(target, longest, batch)
    return arguments


def _bound(prompt: Prompt, max_tokens: int) -> int:
    """At least as many positions as prompt and answers take: a token is a byte or more."""
    messages = [message["content"] for message in prompt.history]
    texts = [prompt.text or "", *prompt.turns, *messages]
    answers = max(1, len(prompt.turns)) * max_tokens
    return len(prompt.token_ids) + answers + sum(len(t.encode()) + _SLACK for t in texts)


def _small_cache(target: str, longest: int, batch: int) -> dict[str, Any]:
    """A key-value cache for twice the batch: what a tree's nodes take is within that."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = longest if limit is None else min(limit, longest)
    per_token = 2 * config.num_hidden_layers * heads * size * 4  # float32 at most
    return {
        "max_model_len": length,
        "kv_cache_memory_bytes": max(1 << 28, 2 * (batch + 1) * length * per_token),
    }
