"""Nodes that a drafter scored, and the best of them as a tree: the end of every drafter's way.

A candidate's value is the sum of the log-confidences down its path, in float32. Candidates are in
order of creation, parents before their children, and terms are never positive, so a child never
beats its parent; of equal values the candidate created first comes first. The best N are hence
closed under parents, parents first and best first, ties or not (EAGLE-2's reranking,
https://arxiv.org/abs/2406.16858, section 4.2, without its ties that lose a parent), and every cut
of a chosen tree is the best tree of its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeBatch

IMPOSSIBLE = -float("inf")  # the value of what can't be right


@dataclass(frozen=True, eq=False)
class Choices:
    """The best choices below some nodes, best first."""

    token_ids: Tensor  # int64 [B, k, K], of the target's vocabulary
    log_confidence: Tensor  # float32 [B, k, K], <= 0, never NaN


@dataclass(frozen=True, eq=False)
class Proposal:
    """A tree of at most N nodes for each request, best first."""

    token_ids: Tensor  # int64 [B, N]; column 0, the root, holds 0
    parents: Tensor  # int64 [B, N], before their children; -1 for the root
    log_survival: Tensor  # float32 [B, N], not increasing; 0 for the root

    @property
    def num_nodes(self) -> Tensor:
        """int64 [B]: nodes that can survive, root included; they are a prefix."""
        return self.log_survival.isfinite().sum(1)

    def trees(self, max_depth: int) -> TreeBatch:
        """The topologies; ``max_depth`` is a bound that is known without asking the device."""
        return TreeBatch.from_parents(self.parents, self.num_nodes, max_depth)


@dataclass(frozen=True, eq=False)
class Candidates:
    """M scored nodes for each request in order of creation; the root, 0, is the first."""

    token_ids: Tensor  # int64 [B, M]
    parents: Tensor  # int64 [B, M] candidates, before their children; any for the root
    depths: Tensor  # int64 [M]
    value: Tensor  # float32 [B, M], never above the parent's; 0 for the root

    def best(self, num_nodes: int) -> Tensor:
        """The candidates of the highest value, best first: int64 [B, <= num_nodes]."""
        return self.value.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes]

    def tree(self, num_nodes: int, max_depth: Tensor) -> Proposal:
        """The best ``num_nodes`` nodes of every request, root included. No host sync.

        Nodes deeper than ``max_depth`` (int64 [B]) come last, with survival -inf: no token of
        theirs would be kept.
        """
        value = self.value.masked_fill(self.depths > max_depth[:, None], IMPOSSIBLE)
        candidates = Candidates(self.token_ids, self.parents, self.depths, value)
        order = candidates.best(num_nodes)  # [B, N]
        nodes = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.zeros_like(value, dtype=torch.int64).scatter_(1, order, nodes)
        parents = place.gather(1, self.parents.gather(1, order).clamp_min(0))
        parents[:, 0] = -1
        tokens = self.token_ids.gather(1, order)
        tokens[:, 0] = 0
        return _padded(Proposal(tokens, parents, value.gather(1, order)), num_nodes)


def _padded(proposal: Proposal, num_nodes: int) -> Proposal:
    """The same with nodes that can't survive behind the last candidate."""
    missing = num_nodes - proposal.token_ids.shape[1]
    if missing <= 0:
        return proposal
    pad = torch.nn.functional.pad
    return Proposal(
        pad(proposal.token_ids, (0, missing)),
        pad(proposal.parents, (0, missing)),
        pad(proposal.log_survival, (0, missing), value=IMPOSSIBLE),
    )
