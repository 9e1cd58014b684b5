"""Adapters for the chaotic Llama, in vLLM's layout: random, and large."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.models import COMMON, HIDDEN, VOCAB

RANK = 8
_HEADS, _SHARED = (COMMON[f"num_{name}_heads"] * COMMON["head_dim"]
                   for name in ("attention", "key_value"))  # fmt: skip
_SHAPES = {  # (out, in) of the matrices of a layer
    "self_attn.q_proj": (_HEADS, HIDDEN),
    "self_attn.v_proj": (_SHARED, HIDDEN),
    "self_attn.o_proj": (HIDDEN, _HEADS),
    "mlp.down_proj": (HIDDEN, COMMON["intermediate_size"]),
}


def save_adapter(folder: Path, seed: int, lm_head: bool = False, vocab: int = VOCAB) -> str:
    """Save an adapter that changes nearly every token; returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    layers = range(COMMON["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}": size for i in layers for name, size in _SHAPES.items()}
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
