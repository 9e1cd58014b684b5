"""A Llama-shaped target with random weights over a paged cache: ten launches per layer.

Linear layers use cuBLAS, attention uses the package's kernel, and other operations use `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.scorer.launch import paged_tree_attention
from vllm_medusa.scorer.paged import PagedBatch


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a target."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    theta: float = 1e4  # base of the RoPE frequencies


LLAMA_2_7B = ModelShape("Llama-2-7B", 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256, 5e5)
TINY = ModelShape("tiny", 2, 32, 48, 2, 1, 16, 11)
SMALL = ModelShape("small", 4, 256, 512, 8, 2, 64, 99)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    qkv: Tensor  # [(Hq + 2 Hkv) * D, H]
    out: Tensor  # [H, Hq * D]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]
    attention_norm: Tensor  # [H]
    mlp_norm: Tensor  # [H]


class Target:
    """Weights, and the forward pass of rows at any positions of their requests."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: str, positions: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int, std: float | None = None) -> Tensor:
            empty = torch.empty(rows, columns, dtype=dtype, device=device)
            return empty.normal_(std=std or columns**-0.5, generator=generator)

        def norm() -> Tensor:
            return 1 + weight(1, shape.hidden, 0.1)[0]

        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        self.embedding = weight(shape.vocab, shape.hidden, 1.0)
        self.layers = [
            Layer(
                weight(qkv, shape.hidden),
                weight(shape.hidden, shape.heads * shape.head_size),
                weight(2 * shape.intermediate, shape.hidden),
                weight(shape.hidden, shape.intermediate),
                norm(),
                norm(),
            )
            for _ in range(shape.layers)
        ]
        self.norm = norm()
        self.lm_head = weight(shape.vocab, shape.hidden)  # [V, H]
        half = shape.head_size // 2
        rates = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * rates
        # [positions, D]: cosines, then sines
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float().to(device)

    def new_caches(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Random caches in vLLM's layout: [num_blocks, Hkv, block_size, 2 D] per layer."""
        shape = (num_blocks, self.shape.kv_heads, block_size, 2 * self.shape.head_size)
        return [
            torch.empty(shape, dtype=self.dtype, device=self.device).normal_() for _ in self.layers
        ]

    def forward(
        self,
        tokens: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        slots: Tensor,  # int64 [T]
        caches: list[Tensor],
        batch: PagedBatch,
    ) -> Tensor:  # [T, H], after the final norm
        """Write keys and values to their slots and attend."""
        from benchmarks.gpu.kernel import add_rms_norm, rotate_and_store, silu_mul

        shape = self.shape
        residual = torch.zeros(len(tokens), shape.hidden, dtype=self.dtype, device=self.device)
        x = F.embedding(tokens, self.embedding)
        for layer, cache in zip(self.layers, caches, strict=True):
            key_cache, value_cache = views(cache)
            qkv = F.linear(add_rms_norm(x, residual, layer.attention_norm), layer.qkv)
            rotate_and_store(
                qkv, positions, slots, self.cos_sin, key_cache, value_cache, shape.heads
            )
            x = F.linear(self.attend(qkv, cache, batch), layer.out)
            gate_up = F.linear(add_rms_norm(x, residual, layer.mlp_norm), layer.gate_up)
            x = F.linear(silu_mul(gate_up), layer.down)
        return add_rms_norm(x, residual, self.norm)

    def attend(self, qkv: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
        """Attention of one layer: [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]."""
        shape = self.shape
        query = qkv.view(len(qkv), -1, shape.head_size)[:, : shape.heads]
        out = query.new_empty(query.shape)
        key_cache, value_cache = views(cache)
        scale = shape.head_size**-0.5
        paged_tree_attention(query, key_cache, value_cache, batch, scale, out=out)
        return out.flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V]."""
        return F.linear(hidden, self.lm_head)


def views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [num_blocks, block_size, Hkv, D] of a cache."""
    keys, values = cache.transpose(1, 2).chunk(2, -1)
    return keys, values
