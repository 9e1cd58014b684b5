"""Dispatch of the proposal: Triton if available, else torch.

Both return the same tokens, without host sync.
"""

from __future__ import annotations

from torch import Tensor

from vllm_medusa import proposer
from vllm_medusa.kernels import uses_kernel
from vllm_medusa.proposer import sharded
from vllm_medusa.proposer.sharded import AllGather, VocabShard
from vllm_medusa.tree.batch import TreeTensors


def propose(logits: Tensor, tree: TreeTensors, token_map: Tensor | None = None) -> Tensor:
    """`proposer.propose`: logits [B, >= max_depth, V_draft] -> int64 [B, N]."""
    if not uses_kernel(logits.device.type):
        return proposer.propose(logits, tree, token_map)
    from vllm_medusa.proposer import kernel

    return kernel.propose(logits, tree, token_map)


def propose_sharded(
    logits: Tensor,
    tree: TreeTensors,
    shard: VocabShard,
    all_gather: AllGather,
    token_map: Tensor | None = None,
) -> Tensor:
    """`sharded.propose_sharded`: a rank's logits [B, >= max_depth, V_shard] -> int64 [B, N]."""
    if not uses_kernel(logits.device.type):
        return sharded.propose_sharded(logits, tree, shard, all_gather, token_map)
    from vllm_medusa.proposer import kernel

    return kernel.propose_sharded(logits, tree, shard, all_gather, token_map)
