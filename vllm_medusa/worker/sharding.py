"""Drafting on tensor-parallel ranks: each scores its own part of the vocabulary.

Every rank drafts, and all must draft alike. Whole LM heads on every rank would have each read all
of them; gathering all logits would copy rows of the whole vocabulary. So a rank ranks its own ids,
and only its best candidates travel (`vllm_medusa.proposer.sharded`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from vllm_medusa.proposer.sharded import VocabShard

FEWEST_IDS = 64  # a rank's part of a smaller vocabulary is not worth the exchange


def num_ranks() -> int:
    """Ranks of the tensor-parallel group."""
    return int(get_tp_group().world_size)


def shard_of_rows(num_ids: int) -> VocabShard | None:
    """Which rows of LM heads over ``num_ids`` ids this rank is to hold; None: all of them."""
    group = get_tp_group()
    if group.world_size == 1 or num_ids < FEWEST_IDS * group.world_size:
        return None
    return VocabShard.of_rank(group.rank_in_group, -(-num_ids // group.world_size), num_ids)


@torch.inference_mode()
def shard_of_target(target: Any, hidden_states: Tensor, num_ids: int) -> VocabShard | None:
    """Which columns ``target.compute_logits_local`` gives; None if the model has no such method.

    ``hidden_states`` [1, hidden_size] are any: vLLM pads the vocabulary, so the width is asked for.
    """
    group = get_tp_group()
    local: Callable[[Tensor], Tensor] | None = getattr(target, "compute_logits_local", None)
    if group.world_size == 1 or local is None:
        return None
    return VocabShard.of_rank(group.rank_in_group, local(hidden_states).shape[-1], num_ids)


def all_gather(keys: Tensor) -> Tensor:
    """int64 [...] of this rank -> [R, ...] of all ranks, the same everywhere."""
    floats = keys.unsqueeze(0).view(torch.float32)  # vLLM's shared memory copies floats only
    return get_tp_group().all_gather(floats, 0).view(torch.int64)
