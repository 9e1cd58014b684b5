"""Widens Medusa heads along with their target (see `benchmarks.enlarge`).

The heads read the target's normalised hidden state, whose new coordinates are 0. New rows of a
residual layer are 0, so that `x + silu(W x + b)` keeps them 0 (`silu(0) = 0`); its new columns read
zeros and are random; the new columns of the LM heads are 0.

The result is one folder that both we and stock vLLM 0.32 load, so both run on the same weights:
heads that share the target's LM head are stored with a copy of it, which stock vLLM needs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.enlarge_target import EnlargeError, read_checkpoint, widen
from vllm_medusa.heads import MedusaHeads, ResBlock, load_heads, save_heads


@torch.no_grad()
def widen_heads(heads: MedusaHeads, width: int, seed: int = 0) -> MedusaHeads:
    """Returns heads on hidden states of `width` that give the same logits.

    Raises:
        EnlargeError: `width` is below the heads' hidden size.

    """
    small = heads.hidden_size
    if width < small:
        raise EnlargeError(f"width {width} is below the heads' hidden size {small}: ask for more")
    wide = MedusaHeads(
        num_heads=heads.num_heads,
        num_layers=heads.num_layers,
        hidden_size=width,
        vocab_size=heads.vocab_size,
        bias=heads.has_bias,
        shared_lm_head=heads.shared_lm_head,
        lm_head_bias=heads.lm_head_bias is not None,
        token_map=heads.token_map,
        num_lm_heads=heads.num_lm_heads,
        dtype=next(heads.parameters()).dtype,
    )
    generator = torch.Generator().manual_seed(seed)
    for old, new in zip(heads.blocks, wide.blocks, strict=True):
        assert isinstance(old, ResBlock)
        assert isinstance(new, ResBlock)
        shape = (heads.num_heads, small, width - small)
        noise = torch.randn(shape, generator=generator) * old.weight.float().std()
        new.weight[:, :small, :small] = old.weight
        new.weight[:, :small, small:] = noise.to(old.weight.dtype)
        if old.bias is not None and new.bias is not None:
            new.bias[:, :small] = old.bias
    if heads.lm_head_weight is not None and wide.lm_head_weight is not None:
        wide.lm_head_weight[:, :, :small] = heads.lm_head_weight
    if heads.lm_head_bias is not None and wide.lm_head_bias is not None:
        wide.lm_head_bias.copy_(heads.lm_head_bias)
    return wide


def enlarge_heads(heads: Path, target: Path, destination: Path, width: int) -> int:
    """Writes the widened heads of the small `target`; returns their parameter count."""
    config = json.loads((target / "config.json").read_text())
    small, info = load_heads(
        heads, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"]
    )
    wide = widen_heads(small, width)
    copy = widen(*_lm_head(target), width) if wide.shared_lm_head else None
    if copy is not None:
        copy = copy.to(next(wide.parameters()).dtype)
    settings = {} if info.tree is None else {"tree": info.tree}
    save_heads(destination, wide, settings, lm_head_weight=copy)
    return sum(tensor.numel() for tensor in wide.parameters())


def _lm_head(target: Path) -> tuple[Tensor, int]:
    """The target's LM head [V, d] and its V."""
    tensors = read_checkpoint(target)
    weight = tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))
    if weight is None:
        raise EnlargeError(f"{target} holds no LM head: pass the folder of the target")
    return weight, weight.shape[0]
