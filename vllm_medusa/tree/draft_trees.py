"""Drafted trees: the single record of a batch's drafts, from the drafter to the sampler.

A node's log-survival is the sum of the log-confidences along its path, in float32: the estimated
probability that verification accepts the node. Terms are never positive and candidates are created
parents first, so no child ranks above its parent, and the best N candidates (ties: created first)
are parents first and closed under parents. Every cut is then a prefix, and the best tree of its
size (EAGLE-2's reranking, https://arxiv.org/abs/2406.16858, section 4.2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_medusa.tree.batch import TreeBatch, TreeTensors

IMPOSSIBLE = -float("inf")  # log-survival of nodes that can't be accepted, and of padding
FROM_DRAFTER, FROM_BOTH, FROM_LOOKUP = 0, 1, 2  # origin of a node


@dataclass(frozen=True, eq=False)
class DraftTrees:
    """Trees of B requests, N nodes each. Nothing here waits for the device.

    `best` takes nodes in order of creation; all other methods expect them best first.
    """

    token_ids: Tensor  # int64 [B, N], of the target's vocabulary; the root's is not read
    parents: Tensor  # int64 [B, N], parents first; -1 for the root
    log_survival: Tensor  # float32 [B, N], <= 0, never above the parent's; 0 for the root
    source: Tensor  # int64 [B, N], `FROM_DRAFTER` etc.

    @classmethod
    def of(cls, token_ids: Tensor, parents: Tensor, log_survival: Tensor) -> DraftTrees:
        """Nodes from a drafter."""
        return cls(token_ids, parents, log_survival, torch.full_like(token_ids, FROM_DRAFTER))

    @classmethod
    def roots(cls, batch: int, num_nodes: int, device: torch.device | str) -> DraftTrees:
        """Roots without drafts."""
        zeros = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
        first = torch.arange(num_nodes, device=device) == 0
        survival = torch.where(first, 0.0, IMPOSSIBLE).expand(batch, -1)
        return cls.of(zeros, zeros.masked_fill(first, -1), survival)

    @classmethod
    def static(cls, tree: TreeTensors, token_ids: Tensor) -> DraftTrees:
        """A whole static tree; ``token_ids`` int64 [B, N]. Survivals only encode its order."""
        survival = _falling(tree.num_nodes, token_ids.device).expand_as(token_ids)
        return cls.of(token_ids, tree.parents.expand_as(token_ids), survival)

    @property
    def num_nodes(self) -> Tensor:
        """int64 [B]: number of nodes that can survive, root included; they are a prefix."""
        return self.log_survival.isfinite().sum(1)

    def best(self, num_nodes: int) -> DraftTrees:
        """The nodes of highest survival, best first; padded to ``num_nodes``."""
        order = self.log_survival.sort(dim=1, descending=True, stable=True).indices
        return self.nodes(order[:, :num_nodes]).padded(num_nodes)

    def nodes(self, order: Tensor) -> DraftTrees:
        """Select nodes in a new order, parents first: int64 [B, K], starting with the root."""
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        place = torch.zeros_like(self.parents).scatter_(1, order, places)
        parents = place.gather(1, self.parents.gather(1, order).clamp_min(0))
        parents[:, 0] = -1
        rest = (self.token_ids, self.log_survival, self.source)
        token_ids, log_survival, source = (part.gather(1, order) for part in rest)
        return DraftTrees(token_ids, parents, log_survival, source)

    def padded(self, num_nodes: int) -> DraftTrees:
        """Pad to at least ``num_nodes`` columns, with nodes that can't survive."""
        missing = num_nodes - self.parents.shape[1]
        if missing <= 0:
            return self
        tokens, parents, source = (
            pad(part, (0, missing)) for part in (self.token_ids, self.parents, self.source)
        )
        survival = pad(self.log_survival, (0, missing), value=IMPOSSIBLE)
        return DraftTrees(tokens, parents, survival, source)

    def prefix(self, num_nodes: int) -> DraftTrees:
        """The first ``num_nodes`` columns."""
        return DraftTrees(*(part[:, :num_nodes] for part in vars(self).values()))

    def limited(self, num_drafts: int | Tensor) -> DraftTrees:
        """Limit the drafts per request (int64 [B] or a number); the others can't survive."""
        limit = num_drafts[:, None] if isinstance(num_drafts, Tensor) else num_drafts
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        return replace(self, log_survival=self.log_survival.masked_fill(nodes > limit, IMPOSSIBLE))

    def topology(self, max_depth: int) -> TreeBatch:
        """The trees without their tokens; ``max_depth`` is an upper bound of depths."""
        return TreeBatch.from_parents(self.parents, self.num_nodes, max_depth)


@functools.lru_cache(maxsize=8)
def _falling(num_nodes: int, device: torch.device) -> Tensor:
    """float32 [N]: 0 for the root, then decreasing from 0.5."""
    node = torch.arange(num_nodes, device=device)
    return torch.where(node == 0, 1.0, 0.5 * (1.0 - (node - 1) / num_nodes)).log()
