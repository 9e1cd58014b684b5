"""A chaotic target with an EAGLE-3 drafter that memorized some of its greedy outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support.eagle import Eagle3, trained_drafter
from support.engines import Prompt, random_prompts
from support.models import STOPS, VOCAB, save_model

LAYERS = (1, 2, 3)
LEARNED, TOKENS = 12, 32


@dataclass
class Case:
    target: str
    model: Any
    drafter: Eagle3
    folder: str
    prompts: list[Prompt]  # whose greedy outputs the drafter memorized
    outputs: list[list[int]]


def make_case(folder: Path) -> Case:
    target = save_model(folder / "target", "Llama", eos_token_id=list(STOPS), num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = random_prompts(LEARNED, VOCAB, shortest=8, longest=8)
    texts = model.generate(
        torch.tensor(prompts), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    made = folder / "drafter"
    drafter = trained_drafter(target, model, texts, 8, LAYERS, made, draft_vocab=200, depth=2)
    return Case(target, model, drafter, str(made), prompts, texts[:, 8:].tolist())


def eagle_config(case: Case, tree: Any, **options: Any) -> dict[str, Any]:
    noise = {"shared_noise": False}  # confidences are then the drafter's own
    return {"method": "eagle3", "model": case.folder, "tree": tree, **noise, **options}
