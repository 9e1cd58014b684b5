"""The repository's model, its trained heads and its prompts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "demo"
TARGET, HEADS = str(DEMO / "target"), str(DEMO / "heads")
VOCAB, HIDDEN = 4096, 256


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def demo_texts(start: int = 0, stop: int | None = None) -> list[str]:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[start:stop]
    return [json.loads(line)["prompt"] for line in lines]


def demo_prompts(start: int = 0, stop: int | None = None) -> list[list[int]]:
    return [tokenizer().encode(text) for text in demo_texts(start, stop)]
