"""Random heads as plain tensors, in every format, and the naive forward pass."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, VOCAB = 8, 20


@dataclass
class RandomHeads:
    """Heads as nested lists: layers[h][l] = (weight, bias or None), lm_heads[h or 0]."""

    layers: list
    lm_heads: list
    token_map: torch.Tensor | None = None

    def logits(self, hidden, target=None):
        """[B, H] -> [B, K, V_draft], head by head and layer by layer."""
        out = []
        for head, layers in enumerate(self.layers):
            x = hidden
            for weight, bias in layers:
                x = x + F.silu(F.linear(x, weight, bias))
            if self.lm_heads:
                weight, bias = self.lm_heads[head % len(self.lm_heads)]
                out.append(F.linear(x, weight, bias))
            else:
                scores = F.linear(x, target)
                out.append(scores if self.token_map is None else scores[:, self.token_map])
        return torch.stack(out, 1)

    def spelled(self, style, prefix=""):
        tensors = {}
        for head, layers in enumerate(self.layers):
            for layer, (weight, bias) in enumerate(layers):
                stem = (
                    f"{head}.{layer}.linear" if style == "v1" else f"blocks.{head}.layers.{layer}"
                )
                tensors[f"{stem}.weight"] = weight
                if bias is not None:
                    tensors[f"{stem}.bias"] = bias
        single = len(self.lm_heads) == 1 < len(self.layers)
        for head, (weight, bias) in enumerate(self.lm_heads):
            stem = f"{head}.{len(self.layers[0])}" if style == "v1" else f"lm_heads.{head}"
            stem = "lm_head" if single else stem
            tensors[f"{stem}.weight"] = weight
            if bias is not None:
                tensors[f"{stem}.bias"] = bias
        if self.token_map is not None:
            tensors["token_map"] = self.token_map
        return {prefix + name: tensor for name, tensor in tensors.items()}


def random_heads(
    num_heads=3,
    num_layers=1,
    bias=True,
    num_lm_heads=None,
    lm_bias=False,
    rows=VOCAB,
    token_map=None,
    dtype=torch.float32,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (0.3 * torch.randn(*shape, generator=generator)).to(dtype)

    layers = [
        [(normal(HIDDEN, HIDDEN), normal(HIDDEN) if bias else None) for _ in range(num_layers)]
        for _ in range(num_heads)
    ]
    count = num_heads if num_lm_heads is None else num_lm_heads
    lm_heads = [(normal(rows, HIDDEN), normal(rows) if lm_bias else None) for _ in range(count)]
    return RandomHeads(layers, lm_heads, token_map)


def write(path: Path, tensors, config=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def write_sharded(folder: Path, shards, index, config=None):
    """``shards``: file name -> tensors; ``index``: the index file's name."""
    for name, tensors in shards.items():
        write(folder / name, tensors, config)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
