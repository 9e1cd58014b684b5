"""Makes a small model big without changing what it computes, so that a benchmark's time is real.

A 4M-parameter model fits a CPU's cache, and then everything that surrounds the forward pass
dominates a step: nothing measured on it tells about a real model, whose weights are streamed from
memory at every step. This script builds a model of real size (hundreds of millions of parameters,
ordinary Llama shapes) that returns the same logits, so drafts are accepted exactly as often.

How each part stays the same (small width d, big width W):

- residual stream: coordinates d..W are always 0, because the embedding's new columns and the new
  rows of every `o_proj` and `down_proj` are 0;
- RMSNorm: with zeros appended the mean square shrinks by d/W, so
  `x / sqrt(mean_W(x^2) + eps')` with `eps' = eps * d/W` is `sqrt(W/d) * x / sqrt(mean_d + eps)`,
  and the gain becomes `w' = w * sqrt(d/W)`. When W/d is a power of 4 both factors are powers of
  two and cost no rounding;
- attention: heads keep their size (RoPE and the softmax scale depend on it) and their key/value
  group; the columns of `o_proj` that read a new query head are 0;
- MLP: the columns of `down_proj` that read a new neuron are 0;
- new layers: `o_proj` and `down_proj` are all 0, so the layer adds nothing;
- LM head: its new columns read zeros.

Every other new weight is random at the scale of the old ones. Dense kernels do the same work for
zeros as for anything else; random values merely leave no doubt about it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_medusa.files import write_json

SUPPORTED = ("LlamaForCausalLM",)
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "hidden_norm.weight")
INTO_RESIDUAL = ("self_attn.o_proj.weight", "mlp.down_proj.weight", "fc.weight")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


class EnlargeError(ValueError):
    """The wanted shape can't hold the small model, or the model is of an unsupported kind."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama model that enlargement changes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Reads the shape from a Hugging Face `config.json`."""
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
        )


# About the proportions of published 300-400M models; 26 layers make 310M parameters.
BIG = Shape(hidden_size=1024, intermediate_size=2816, num_layers=26, num_heads=16, num_kv_heads=8)


class Enlarger:
    """Maps the tensors of one model to those of a bigger one with the same outputs.

    Each dimension of ``big`` is at least the small one's; ``seed`` is of the random filling.

    Raises:
        EnlargeError: the architecture is not supported or a dimension is too small.

    """

    def __init__(self, config: dict[str, Any], big: Shape = BIG, seed: int = 0) -> None:
        architecture = (config.get("architectures") or ["?"])[0]
        if architecture not in SUPPORTED:
            raise EnlargeError(
                f"can't enlarge {architecture}: only {', '.join(SUPPORTED)} is supported, since "
                "other architectures normalise or add biases differently"
            )
        self.config = config
        self.small = Shape.of(config)
        self.big = big
        self.head_dim: int = (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
        for name in Shape.__dataclass_fields__:
            have, want = getattr(self.small, name), getattr(big, name)
            if want < have:
                raise EnlargeError(f"{name} {want} is below the model's {have}: ask for more")
        self.group = self.small.num_heads // self.small.num_kv_heads
        self.big_group = big.num_heads // big.num_kv_heads
        if big.num_heads % big.num_kv_heads or self.big_group < self.group:
            raise EnlargeError(
                f"{big.num_heads} query heads over {big.num_kv_heads} key/value heads can't hold "
                f"groups of {self.group}: choose num_heads as a multiple of num_kv_heads, at "
                f"least {self.group} times it"
            )
        self.norm_gain = math.sqrt(self.small.hidden_size / big.hidden_size)
        self.generator = torch.Generator().manual_seed(seed)

    def big_config(self) -> dict[str, Any]:
        """The `config.json` of the big model."""
        ratio = self.small.hidden_size / self.big.hidden_size
        return self.config | {
            "hidden_size": self.big.hidden_size,
            "intermediate_size": self.big.intermediate_size,
            "num_hidden_layers": self.big.num_layers,
            "num_attention_heads": self.big.num_heads,
            "num_key_value_heads": self.big.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.config["rms_norm_eps"] * ratio,
        }

    def tensors(self, small: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the big model's tensors by name, in the dtypes of the small ones."""
        yield from (
            (name, self.outer(name, tensor))
            for name, tensor in small.items()
            if ".layers." not in name
        )
        for layer in range(self.big.num_layers):
            real = layer < self.small.num_layers
            prefix = f"model.layers.{layer if real else 0}."
            for name, tensor in small.items():
                if name.startswith(prefix):
                    part = name.removeprefix(prefix)
                    grown = self.inner(part, tensor)
                    if not real and part in INTO_RESIDUAL:
                        grown.zero_()
                    yield f"model.layers.{layer}.{part}", grown

    def outer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of what surrounds the layers, by its name."""
        width = self.big.hidden_size
        if name.removeprefix("model.") == "norm.weight":
            return self._norm(tensor)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # [V, d]
            return widen(tensor, tensor.shape[0], width)
        raise EnlargeError(f"unexpected tensor {name!r}: not part of a plain Llama checkpoint")

    def inner(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a layer, by its name there; an EAGLE drafter's has some more."""
        if part in NORMS:
            return self._norm(tensor)
        width, dim = self.big.hidden_size, self.head_dim
        query, key = self._query_rows(), torch.arange(self.small.num_kv_heads * dim)
        hidden, inputs = self._hidden(tensor)
        every = torch.arange(self.small.hidden_size)
        neurons = torch.arange(self.small.intermediate_size)
        rows, columns, big_rows, big_columns = {
            "self_attn.q_proj.weight": (query, hidden, self.big.num_heads * dim, inputs),
            "self_attn.k_proj.weight": (key, hidden, self.big.num_kv_heads * dim, inputs),
            "self_attn.v_proj.weight": (key, hidden, self.big.num_kv_heads * dim, inputs),
            "self_attn.o_proj.weight": (every, query, width, self.big.num_heads * dim),
            "mlp.gate_proj.weight": (neurons, every, self.big.intermediate_size, width),
            "mlp.up_proj.weight": (neurons, every, self.big.intermediate_size, width),
            "mlp.down_proj.weight": (every, neurons, width, self.big.intermediate_size),
            "fc.weight": (every, hidden, width, inputs),
        }.get(part, (None, None, 0, 0))
        if rows is None or columns is None:
            raise EnlargeError(f"unexpected tensor {part!r} in a layer (biases can't be enlarged)")
        if part in INTO_RESIDUAL:
            grown = torch.zeros(big_rows, big_columns, dtype=tensor.dtype)
        else:
            noise = torch.randn(big_rows, big_columns, generator=self.generator)
            grown = (noise * tensor.float().std()).to(tensor.dtype)
        grown[rows[:, None], columns] = tensor
        return grown

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        gains = torch.ones(self.big.hidden_size, dtype=weight.dtype)
        gains[: weight.shape[0]] = weight * self.norm_gain
        return gains

    def _hidden(self, matrix: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Where columns that read hidden states go, n side by side: [n * d] int64, and n * W."""
        count = max(1, matrix.shape[-1] // self.small.hidden_size)
        starts = torch.arange(count)[:, None] * self.big.hidden_size
        columns = (starts + torch.arange(self.small.hidden_size)).flatten()
        return columns, count * self.big.hidden_size

    def _query_rows(self) -> torch.Tensor:
        """Where the rows of the small `q_proj` go: [num_heads * head_dim] int64."""
        head = torch.arange(self.small.num_heads)
        big_head = head // self.group * self.big_group + head % self.group
        return (big_head[:, None] * self.head_dim + torch.arange(self.head_dim)).flatten()


def widen(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Appends zeros to `[r, c]` until it is `[rows, columns]`."""
    grown = torch.zeros(rows, columns, dtype=matrix.dtype)
    grown[: matrix.shape[0], : matrix.shape[1]] = matrix
    return grown


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Reads every `*.safetensors` tensor of a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not tensors:
        raise EnlargeError(f"no *.safetensors in {folder}: pass a folder with a checkpoint")
    return tensors


def enlarge_target(source: Path, destination: Path, big: Shape = BIG) -> int:
    """Writes the enlarged checkpoint of `source` to `destination`; returns its parameter count."""
    enlarger = Enlarger(json.loads((source / "config.json").read_text()), big)
    tensors = dict(enlarger.tensors(read_checkpoint(source)))
    destination.mkdir(parents=True, exist_ok=True)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    write_json(destination / "config.json", enlarger.big_config())
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)
    return sum(tensor.numel() for tensor in tensors.values())
