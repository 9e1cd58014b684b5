"""Dispatch of the proposal: Triton if available, else torch.

Both return the same tokens, without host sync.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_medusa import proposer
from vllm_medusa.kernels import uses_kernel
from vllm_medusa.proposer import sharded
from vllm_medusa.proposer.sharded import AllGather, VocabShard
from vllm_medusa.tree.batch import TreeTensors


def propose(
    logits: Tensor,  # [B, >= max_depth, V_draft], with a shard [B, >= max_depth, V_shard]
    tree: TreeTensors,
    token_map: Tensor | None = None,
    shard: VocabShard | None = None,  # of this rank; None: the logits are of the whole vocabulary
    all_gather: AllGather | None = None,  # of all ranks, for a shard
) -> Tensor:
    """`proposer.propose`, or for a shard `sharded.propose_sharded`: int64 [B, N]."""
    module: Any = proposer if shard is None else sharded
    if uses_kernel(logits.device.type):
        from vllm_medusa.proposer import kernel

        module = kernel
    if shard is None:
        tokens: Tensor = module.propose(logits, tree, token_map)
    else:
        tokens = module.propose_sharded(logits, tree, shard, all_gather, token_map)
    return tokens
