"""Drafting on tensor-parallel ranks: each scores its shard of the vocabulary.

All ranks must draft identically. With complete LM heads, every rank would read all of them;
gathering logits would copy rows of the whole vocabulary. So each rank selects the best candidates
among its own ids, and only these are exchanged (`vllm_medusa.proposer.topk`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from vllm_medusa.proposer.topk import VocabShard

FEWEST_IDS = 64  # for smaller shards the exchange does not pay off


def num_ranks() -> int:
    """Ranks of the tensor-parallel group."""
    return int(get_tp_group().world_size)


def shard_of_rows(num_ids: int) -> VocabShard | None:
    """The rows of LM heads over ``num_ids`` ids that this rank stores; None: all."""
    group = get_tp_group()
    if group.world_size == 1 or num_ids < FEWEST_IDS * group.world_size:
        return None
    return VocabShard.of_rank(group.rank_in_group, -(-num_ids // group.world_size), num_ids)


@torch.inference_mode()
def shard_of_target(target: Any, hidden_states: Tensor, num_ids: int) -> VocabShard | None:
    """The columns of ``target.compute_logits_local``; None if the model has no such method.

    ``hidden_states`` [1, hidden_size] are arbitrary: only the padded width of the output is used.
    """
    group = get_tp_group()
    local: Callable[[Tensor], Tensor] | None = getattr(target, "compute_logits_local", None)
    if group.world_size == 1 or local is None:
        return None
    return VocabShard.of_rank(group.rank_in_group, local(hidden_states).shape[-1], num_ids)


def all_gather(keys: Tensor) -> Tensor:
    """int64 [...] of this rank -> [R, ...] of all ranks, equal on all ranks."""
    floats = keys.unsqueeze(0).view(torch.float32)  # vLLM's shared memory only supports floats
    return get_tp_group().all_gather(floats, 0).view(torch.int64)
