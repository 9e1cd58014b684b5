"""Tree attention over the latent cache of MLA (multi-head latent attention, DeepSeek-V2), in torch.

The cache has one vector per token for all heads: a latent of ``rank`` channels, then a RoPE key.
With the up-projection of keys absorbed into the queries, and that of values applied to the result,
attention is multi-query: the keys are the vectors, the values their first ``rank`` channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LatentPlan:
    """What the rows of some requests attend to in one step; shared by all layers."""

    rows: list[slice]  # of each request's queries
    slots: list[Tensor]  # int64 [L], cache slots of its context, then of its own keys
    masks: list[Tensor]  # bool [rows, own keys]

    @classmethod
    def of(
        cls,
        starts: Sequence[int],  # first query row of each request
        base: Sequence[int],  # context tokens, which all its rows attend to
        masks: list[Tensor],  # bool [rows, own keys], which of the keys after them each row does
        block_table: Tensor,  # integer [B, >= ceil((base + own keys) / block_size)]
        block_size: int,
    ) -> LatentPlan:
        """Find the cache slots of all keys."""
        rows, slots = [], []
        for request, (start, before, mask) in enumerate(zip(starts, base, masks, strict=True)):
            token = torch.arange(before + mask.shape[1])
            blocks = block_table[request, token // block_size].to(torch.int64)
            rows.append(slice(start, start + mask.shape[0]))
            slots.append(blocks * block_size + token % block_size)
        return cls(rows, slots, masks)


def latent_attention(
    query: Tensor,  # [T, num_heads, width], keys' up-projection absorbed, then the RoPE channels
    kv_cache: Tensor,  # [num_blocks, block_size, width]
    plan: LatentPlan,
    rank: int,
    scale: float,
    out: Tensor,  # [T, num_heads, rank]
    *,
    round_weights: bool = False,
) -> None:
    """Attend the plan's rows to their visible keys, in fp32; other rows of ``out`` are unchanged.

    Keys and values of this step are already in the cache. Own keys that no row of a request sees
    must be finite. ``round_weights`` rounds exp(logit - largest) to bf16, as vLLM's kernel for AMX
    does; results then equal its own.
    """
    tokens = kv_cache.view(-1, kv_cache.shape[-1])
    for rows, slots, mask in zip(plan.rows, plan.slots, plan.masks, strict=True):
        keys = tokens[slots].float()  # [L, width]
        queries = query[rows].float() * scale  # [n, num_heads, width]
        logits = (queries.flatten(0, 1) @ keys.T).unflatten(0, queries.shape[:2])
        own = logits[..., len(slots) - mask.shape[1] :]
        own.masked_fill_(~mask.unsqueeze(1), float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp_().flatten(0, 1)
        total = weights.sum(-1, keepdim=True)
        if round_weights:
            weights = weights.bfloat16().float()
        result = weights @ keys[:, :rank] / total
        out[rows] = result.unflatten(0, queries.shape[:2]).to(out.dtype)
