"""The model that tests share, 4M parameters, with its trained heads and prompts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[2] / "tests" / "assets"
TARGET, HEADS = str(ASSETS / "target"), str(ASSETS / "heads")
VOCAB, HIDDEN = 4096, 256


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def code_texts(start: int = 0, stop: int | None = None) -> list[str]:
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines()[start:stop]
    return [json.loads(line)["prompt"] for line in lines]


def code_prompts(start: int = 0, stop: int | None = None) -> list[list[int]]:
    return [tokenizer().encode(text) for text in code_texts(start, stop)]


@functools.cache
def trained_model() -> tuple[Any, Any]:
    """The model in transformers and its heads, for `decode`; both in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_medusa.heads.checkpoint import load_heads

    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    return model, load_heads(HEADS, **sizes, dtype=torch.float32)[0]
