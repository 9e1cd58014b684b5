"""Greedy acceptance: a node is kept when it is the target's argmax at its parent.

The output equals plain greedy decoding. All nodes are verified at once, without a walk: at most one
child of a node is kept, so the kept nodes below the root form one path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.sampler.path import Verdict, accept_path, close_path
from vllm_medusa.tree.batch import TreeBatch


def greedy_verdict(tree: TreeBatch, token_ids: Tensor, target_argmax: Tensor) -> Verdict:
    """Verify ``token_ids`` int64 [B, N] with ``target_argmax`` int64 [B, N] at each node.

    Equals `lossless_walk` with a sampler that returns the argmax: of siblings with the same
    token, the first in node order is kept.
    """
    parents = tree.parents.clamp(min=0)  # [B, N]
    index = torch.arange(tree.max_nodes, device=parents.device).expand_as(parents)
    match = (token_ids == target_argmax.gather(1, parents)) & tree.valid & (index > 0)
    candidate = torch.where(match, index, tree.max_nodes)  # [B, N]
    first = torch.full_like(parents, tree.max_nodes)  # [B, N] by parent: its first matching child
    first = first.scatter_reduce(1, parents, candidate, "amin")
    path = accept_path(tree, match & (first.gather(1, parents) == index))
    final = target_argmax.gather(1, path.last_node.unsqueeze(1)).squeeze(1)
    return close_path(path, token_ids, final)
