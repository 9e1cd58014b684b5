"""Widens Medusa and Hydra heads and EAGLE-3 drafters along with their target (`enlarge_target`).

The heads read the target's normalised hidden state, whose new coordinates are 0. New rows of a
residual layer are 0, so that `x + silu(W x + b)` keeps them 0 (`silu(0) = 0`); its new columns read
zeros and are random; the new columns of the LM heads are 0. Hydra's first layers read a state and
embeddings side by side, each widened. A drafter's layer becomes one of the large target's shape.

The result is one folder that both we and stock vLLM 0.32 load, so both run on the same weights:
Medusa heads that share the target's LM head are stored with a copy of it, which stock vLLM needs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.enlarge_target import (
    SUPPORTED,
    EnlargeError,
    Enlarger,
    Shape,
    read_checkpoint,
    widen,
)
from vllm_medusa.files import write_json
from vllm_medusa.heads import MedusaHeads, ResBlock, load_heads, save_heads
from vllm_medusa.heads.hydra import HydraHeads, HydraInput


@torch.no_grad()
def widen_heads(heads: MedusaHeads, width: int, seed: int = 0) -> MedusaHeads:
    """Returns heads on hidden states of `width` that give the same logits.

    Raises:
        EnlargeError: `width` is below the heads' hidden size.

    """
    small = heads.hidden_size
    if width < small:
        raise EnlargeError(f"width {width} is below the heads' hidden size {small}: ask for more")
    wide = _of_width(heads, width)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(heads, HydraHeads) and isinstance(wide, HydraHeads):
        for old, new in zip(heads.inputs, wide.inputs, strict=True):
            assert isinstance(old, HydraInput)
            assert isinstance(new, HydraInput)
            _widen_input(old, new, generator)
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


def _of_width(heads: MedusaHeads, width: int) -> MedusaHeads:
    """Untrained heads of the same kind, but for the width."""
    bias, dtype = heads.lm_head_bias is not None, next(heads.parameters()).dtype
    sizes = (heads.num_heads, heads.num_layers, width, heads.vocab_size)
    if isinstance(heads, HydraHeads):
        count = heads.num_lm_heads
        return HydraHeads(*sizes, num_lm_heads=count, lm_head_bias=bias, dtype=dtype)
    return MedusaHeads(
        *sizes,
        bias=heads.has_bias,
        shared_lm_head=heads.shared_lm_head,
        lm_head_bias=bias,
        token_map=heads.token_map,
        num_lm_heads=heads.num_lm_heads,
        dtype=dtype,
    )


def _widen_input(old: HydraInput, new: HydraInput, generator: torch.Generator) -> None:
    """[H, n * H] weights of n inputs side by side."""
    for narrow, wide in ((old.weight, new.weight), (old.skip_weight, new.skip_weight)):
        small, width = len(narrow), len(wide)
        noise = torch.randn(small, wide.shape[1], generator=generator) * narrow.float().std()
        wide.zero_()
        wide[:small] = noise.to(wide.dtype)
        wide.unflatten(1, (-1, width))[:small, :, :small] = narrow.unflatten(1, (-1, small))
    new.bias[: len(old.bias)], new.skip_bias[: len(old.bias)] = old.bias, old.skip_bias


def enlarge_drafter(drafter: Path, destination: Path, big: Shape) -> int:
    """Writes an EAGLE-3 drafter, as `train` does, for the large target; returns its size.

    Raises:
        EnlargeError: it has a tensor that such drafters don't have.

    """
    config = json.loads((drafter / "config.json").read_text())
    enlarger = Enlarger(config | {"architectures": [*SUPPORTED]}, replace(big, num_layers=1))
    tensors = {}
    for name, tensor in read_checkpoint(drafter).items():
        if name in ("d2t", "t2d"):
            tensors[name] = tensor
        elif name == "fc.weight" or name.startswith("midlayer."):
            tensors[name] = enlarger.inner(name.removeprefix("midlayer."), tensor)
        else:
            tensors[name] = enlarger.outer(name, tensor)
    destination.mkdir(parents=True, exist_ok=True)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    write_json(
        destination / "config.json",
        enlarger.big_config() | {"architectures": config["architectures"]},
    )
    return sum(tensor.numel() for tensor in tensors.values())


def enlarge_heads(heads: Path, target: Path, destination: Path, width: int) -> int:
    """Writes the widened heads of the small `target`; returns their parameter count."""
    config = json.loads((target / "config.json").read_text())
    small, info = load_heads(
        heads, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"]
    )
    wide = widen_heads(small, width)
    stock = wide.shared_lm_head and not isinstance(wide, HydraHeads)
    count = sum(tensor.numel() for tensor in wide.parameters())
    if stock:
        rows = widen(*_lm_head(target), width).to(next(wide.parameters()).dtype)
        wide.store_lm_head(rows if wide.token_map is None else rows[wide.token_map])
    settings = {} if info.tree is None else {"tree": info.tree}
    save_heads(destination, wide, settings)
    return count


def _lm_head(target: Path) -> tuple[Tensor, int]:
    """The target's LM head [V, d] and its V."""
    tensors = read_checkpoint(target)
    weight = tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))
    if weight is None:
        raise EnlargeError(f"{target} holds no LM head: pass the folder of the target")
    return weight, weight.shape[0]
