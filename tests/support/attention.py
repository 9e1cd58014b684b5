"""References for attention tests: the keys that a row sees, whole tokens of a CPU cache.

They share no code with the fast paths: what a node sees is found by following its parents, so that
an error in packed bits, depths, tables or plans causes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_medusa.scorer.layout import CacheLayout


def visible_keys(context: int, parents: Sequence[int], window: int | None = None) -> Tensor:
    """Which keys each row of one request sees: bool [n, context + n].

    Args:
        context: tokens before the rows; their keys come first.
        parents: of each row, -1 for the root; ``range(-1, n - 1)`` for rows that are not a tree.
        window: keys at positions > p - window are seen from position p; None for all.

    """
    seen = torch.zeros(len(parents), context + len(parents), dtype=torch.bool)
    seen[:, :context] = True
    depths: list[int] = []
    for row, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        node = row
        while node >= 0:
            seen[row, context + node] = True
            node = parents[node]
    if window is not None:
        own = context + torch.tensor(depths)  # positions: siblings share one
        seen &= torch.cat((torch.arange(context), own)) > own.unsqueeze(1) - window
    return seen


def gather_tokens(kv_cache: Tensor, isa: str, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Read whole tokens: keys and values, each [..., num_kv_heads, head_size] for slots [...]."""
    layout = CacheLayout.of(kv_cache, isa)
    tokens = flat(layout, kv_cache)[element_offsets(layout, slots.to(torch.int64))]
    return tokens[..., 0, :], tokens[..., 1, :]


def flat(layout: CacheLayout, kv_cache: Tensor) -> Tensor:
    """View all elements of the cache as one row."""
    span = (kv_cache.shape[0] - 1) * layout.block_stride + kv_cache[0].numel()
    return kv_cache.as_strided((span,), (1,))


def element_offsets(layout: CacheLayout, slots: Tensor) -> Tensor:
    """Offsets in it of all elements of the tokens in ``slots`` [...].

    int64 [..., num_kv_heads, 2, head_size], keys before values.
    """
    block = torch.div(slots, layout.block_size, rounding_mode="floor")
    token = layout.token_offsets[:, slots - block * layout.block_size]  # [2, ...]
    start = (block * layout.block_stride + token).movedim(0, -1)  # [..., 2]
    return start[..., None, :, None] + layout.channel_offsets
