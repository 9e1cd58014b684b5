"""Adapters for chaotic targets, in vLLM's layout: random, and large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.models import COMMON, HIDDEN, VOCAB

RANK = 8


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) of the matrices of a layer."""
    heads, shared = (
        config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value")
    )
    return {
        "self_attn.q_proj": (heads, HIDDEN),
        "self_attn.v_proj": (shared, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads),
        "mlp.down_proj": (HIDDEN, config["intermediate_size"]),
    }


def save_adapter(
    folder: Path, seed: int, lm_head: bool = False, vocab: int = VOCAB, **changes: Any
) -> str:
    """Save an adapter that changes nearly every token; returns its folder.

    ``changes`` are those of the target's config, see `save_model`.
    """
    generator, config = torch.Generator().manual_seed(seed), COMMON | changes
    shapes = {
        f"model.layers.{layer}.{name}": size
        for layer in range(config["num_hidden_layers"])
        for name, size in _shapes(config).items()
    }
    if lm_head:
        shapes["lm_head"] = (vocab, HIDDEN)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        stem = f"base_model.model.{name}"
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            matrix = 0.2 * torch.randn(shape, generator=generator)
            tensors[f"{stem}.lora_{part}.weight"] = matrix
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules,
              "bias": "none", "task_type": "CAUSAL_LM"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
