"""Dispatch of the acceptance rules: Triton if available, else torch.

No host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.sampler import typical
from vllm_medusa.sampler.greedy import greedy_verdict
from vllm_medusa.sampler.path import Path, Verdict
from vllm_medusa.tree.batch import TreeBatch


def target_verdict(tree: TreeBatch, token_ids: Tensor, target_ids: Tensor) -> Verdict:
    """Keep every draft that is the target's own token at its parent; both int64 [B, N].

    With the argmax at each node this is greedy acceptance, with sampled tokens lossless acceptance.
    """
    if not uses_kernel(token_ids.device.type):
        return greedy_verdict(tree, token_ids, target_ids)
    from vllm_medusa.sampler import launch

    return launch.target_verdict(tree, token_ids, target_ids)


def typical_path(
    tree: TreeBatch,
    token_ids: Tensor,  # int64 [B, N]
    logits: Tensor,  # float [R, V], processed
    row_of_node: Tensor,  # int64 [B, N]
    epsilon: Tensor,  # fp32 [B]
    delta: Tensor,  # fp32 [B]
) -> Path:
    """`typical.typical_path` for ``logits[row_of_node]``, up to rounding."""
    if not uses_kernel(token_ids.device.type):
        probs = logits[row_of_node].softmax(-1, dtype=torch.float32)  # [B, N, V]
        return typical.typical_path(tree, token_ids, probs, epsilon, delta)
    from vllm_medusa.sampler import launch

    return launch.typical_path(tree, token_ids, logits, row_of_node, epsilon, delta)
