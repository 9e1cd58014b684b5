"""Layout of keys and values in the blocks of vLLM's paged CPU cache.

The cache of a layer is [num_blocks, num_kv_heads, block_size, 2 * head_size]. For each block and
head the first half of the 2 * block_size * head_size elements holds the keys and the second half
the values. Within a half, the offset of token t and channel d is always a
sum, ``token_offset[t] + channel_offset[d]``. With bs tokens per block and D channels:

    isa          keys                                   values
    vec, vec16   t + d*bs                               t*D + d
    amx          (t//16)*16D + (t%16)*2                 (t//2)*32 + t%2
                 + (d//2)*32 + d%2                      + (d//16)*16bs + (d%16)*2

so ``vec`` keys are transposed, [D, bs], and ``vec`` values are token-major, [bs, D], for every
dtype; ``amx`` pairs adjacent channels (keys) or tokens (values) of bfloat16, as required by its
tile loads. Determined by writing numbered tokens with ``cpu_attn_reshape_and_cache`` of vLLM
0.32.0; tests/integration/test_cpu_layout.py repeats this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SUPPORTED_ISAS = ("vec", "vec16", "amx")


@dataclass(frozen=True)
class CacheLayout:
    """Shape and packing of one layer's cache; layers with equal layouts share one plan per step."""

    isa: str  # of the attention layer, as vLLM chose it
    num_kv_heads: int
    block_size: int
    head_size: int
    block_stride: int  # elements from one block to the next

    def __post_init__(self) -> None:
        if self.isa not in SUPPORTED_ISAS:
            raise ValueError(
                f"CPU attention isa {self.isa!r} has an unknown cache layout; supported: "
                f"{', '.join(SUPPORTED_ISAS)}. Run Medusa on an x86 CPU."
            )
        if self.isa == "amx" and (self.block_size % 32 or self.head_size % 32):
            raise ValueError(
                f"isa 'amx' needs a block size and a head size divisible by 32, not "
                f"{self.block_size} and {self.head_size}; set --block-size to a multiple of 32."
            )

    @classmethod
    def of(cls, kv_cache: Tensor, isa: str) -> CacheLayout:
        """Read the layout of ``kv_cache`` [num_blocks, num_kv_heads, block_size, 2 * head_size].

        Blocks need not be adjacent, but each block must be contiguous.
        """
        if kv_cache.dim() != 4 or kv_cache.shape[3] % 2:
            raise ValueError(
                f"kv_cache has shape {tuple(kv_cache.shape)}; expected [num_blocks, "
                "num_kv_heads, block_size, 2 * head_size]. Pass vLLM's own CPU cache tensor."
            )
        _, heads, block_size, width = kv_cache.shape
        stride = kv_cache.stride(0)
        inside = (block_size * width, width, 1)
        if kv_cache.stride()[1:] != inside or stride % block_size or stride % (width // 2):
            raise ValueError(
                f"kv_cache has strides {kv_cache.stride()}; expected (any multiple of block and "
                f"head size, {', '.join(map(str, inside))}). Pass vLLM's own CPU cache tensor."
            )
        return cls(isa, heads, block_size, width // 2, stride)

    @cached_property
    def token_offsets(self) -> Tensor:
        """int64 [2, block_size]: the token's part of an element's offset; keys, then values."""
        t = torch.arange(self.block_size)
        if self.isa == "amx":
            return torch.stack((t // 16 * 16 * self.head_size + t % 16 * 2, t // 2 * 32 + t % 2))
        return torch.stack((t, t * self.head_size))

    @cached_property
    def channel_offsets(self) -> Tensor:
        """int64 [num_kv_heads, 2, head_size]: the part of head, half and channel."""
        d = torch.arange(self.head_size)
        if self.isa == "amx":
            inner = (d // 2 * 32 + d % 2, d // 16 * 16 * self.block_size + d % 16 * 2)
        else:
            inner = (d * self.block_size, d)
        halves = torch.arange(2 * self.num_kv_heads).view(-1, 2, 1)
        return halves * self.block_size * self.head_size + torch.stack(inner)
