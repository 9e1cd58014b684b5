"""A chaotic target with heads that memorized its outputs: Medusa's, and Hydra's.

Hydra heads are right only below the true path. Those for static trees store LM heads. Those for
dynamic trees use the target's rows of most tokens, and are wrong for all other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support.engines import random_prompts
from support.hydra import save_fitted_hydra
from support.models import VOCAB, save_fitted_heads, save_model
from support.reference import assert_chaotic
from support.runner import sized
from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.dynamic import BEAM_WIDTH, Beam, DynamicTree

HIDDEN = 512  # more than the number of states that the heads memorize: COUNT prompts of TOKENS
HEADS, NODES = 4, 12
KNOWN = 470  # of 512 tokens
TOKENS, COUNT = sized(48, 24), sized(6, 2)


def _static(*widths: int) -> tuple[dict[str, Any], TokenTree]:
    tree = TokenTree.dense(widths)
    return {"tree": tree.to_lists()}, tree


TREES: dict[str, tuple[dict[str, Any], TokenTree | DynamicTree]] = {
    "medusa": _static(3, 3, 2, 2),
    "hydra": _static(3, 2, 1, 1),
    "dynamic hydra": (
        {"tree": None, "budget": NODES},
        DynamicTree(Beam(BEAM_WIDTH, BEAM_WIDTH, HEADS), NODES + 1),
    ),
}


@dataclass
class Fitted:
    """A chaotic target, heads that memorized its greedy outputs, the oracle's results."""

    model: str
    heads: dict[str, str]  # by the name of the tree
    prompts: list[list[int]]
    expected: dict[str, list[DecodeResult]]


def make_case(folder: Path) -> Fitted:
    """Answers of the target, and heads solved for them."""
    path = save_model(
        folder / "model", "Llama", hidden_size=HIDDEN, num_attention_heads=8, head_dim=64,
        num_key_value_heads=4, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_prompts(COUNT, VOCAB, longest=60, seed=5)
    states, paths = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS + HEADS + 1, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
            out = model(ids, output_hidden_states=True).hidden_states[-1][0]
            for end in range(len(prompt), len(prompt) + TOKENS):
                states.append(out[end - 1])  # its token is ids[end]; head h says ids[end + 1 + h]
                paths.append(ids[0, end : end + HEADS + 1])
    learnt = torch.stack(states), torch.stack(paths)
    embedding = model.get_input_embeddings().weight.detach()
    lm_head = model.get_output_embeddings().weight.detach()
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:KNOWN]
    saved = {
        "medusa": save_fitted_heads(folder / "medusa", learnt[0], learnt[1][:, 1:].tolist()),
        "hydra": save_fitted_hydra(folder / "hydra", embedding, *learnt),
        "dynamic hydra": save_fitted_hydra(folder / "dynamic", embedding, *learnt, lm_head, known),
    }
    expected = {}
    for kind, (_, tree) in TREES.items():
        heads: Any = load_heads(
            saved[kind], hidden_size=HIDDEN, vocab_size=VOCAB, dtype=torch.float32
        )[0]
        if kind != "medusa":
            heads.use_target_embedding(embedding)
        expected[kind] = [decode(model, heads, tree, torch.tensor(p), TOKENS) for p in prompts]
    assert_chaotic([result.token_ids for result in expected["medusa"]])
    return Fitted(path, saved, prompts, expected)
