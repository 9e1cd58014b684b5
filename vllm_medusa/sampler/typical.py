"""Typical acceptance: keep drafts above a target probability threshold (not lossless).

Medusa, https://arxiv.org/abs/2401.10774, section 2.3.1. With p the target distribution at the
parent, after the request's temperature and truncation, and H its entropy in nats, x is kept when

    p(x) > min(epsilon, delta * exp(-H))

A flat p lowers the threshold; for a peaked p it is epsilon. The longest kept path is used, then the
most probable; the token that ends the step is sampled, or taken greedily, by the caller from p at
the path's last node. Requests at temperature 0 belong to `greedy_verdict`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.sampler.path import Path, accept_path
from vllm_medusa.tree.batch import TreeBatch


def typical_path(
    tree: TreeBatch, token_ids: Tensor, probs: Tensor, epsilon: Tensor, delta: Tensor
) -> Path:
    """The longest path of plausible nodes; ties go to the likelier path, then the lower node.

    ``token_ids`` is int64 [B, N], negative: no draft; ``probs`` fp32 [B, N, V] the
    target's distribution at each node; ``epsilon`` and ``delta`` fp32 [B].
    """
    parents = tree.parents.clamp(min=0)  # [B, N]
    entropy = torch.special.entr(probs).sum(-1)  # [B, N]; -p log p is 0 at p = 0
    threshold = delta.unsqueeze(1) * torch.exp(-entropy)
    threshold = torch.minimum(threshold, epsilon.unsqueeze(1).to(threshold.dtype))
    entry = parents * probs.shape[-1] + token_ids.clamp(min=0)  # [B, N] into [N * V]
    p = probs.flatten(1).gather(1, entry)  # [B, N], probability of each node given its parent
    accepted = (p > threshold.gather(1, parents)) & (token_ids >= 0)
    log_p = torch.where(accepted & (tree.parents >= 0), p.log(), 0.0)
    score = torch.zeros_like(log_p)
    for _ in range(tree.max_depth):  # root to leaf, so that equal paths have equal sums
        score = torch.where(tree.parents >= 0, score.gather(1, parents) + log_p, 0.0)
    return accept_path(tree, accepted, score)
