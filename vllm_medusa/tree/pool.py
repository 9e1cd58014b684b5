r"""Dynamic trees: every request, every step, the best part of one large static tree.

The *pool* is a static tree of many nodes, more than anyone verifies. A step scores each of its
nodes by its *survival*, the estimated probability that the walk gets there: the product of the
confidences on the node's path (EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.1, on Medusa's
marginals). The N nodes of the highest survival are the tree of the step.

No node survives more often than its parent, and of equal nodes the one with the lower index comes
first, so the chosen nodes are closed under ancestors, parents first and best first. Hence every cut
of a chosen tree is the best tree of its size, and budgets and shares are mere counts.

    pool      0          survival (log)        chosen, N = 3         a row of `order`
             / \         0                     0                     [0, 1, 3]
            1   2        -0.2  -1.8            1   node 1 of the tree
           / \           -0.5  -3.0            3   node 2, its parent is node 1
          3   4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.packing import pack_ancestors
from vllm_medusa.tree.topology import TokenTree


@dataclass(frozen=True, eq=False)
class Pool:
    """The pool on one device."""

    tensors: TreeTensors  # of M nodes
    places: Tensor  # int64 [D, M]: where in [D * width] marginals a path's d-th choice is
    on_path: Tensor  # bool [D, M]: whether the path has a d-th choice
    last_place: Tensor  # int64 [M]: where in the marginals the node's own choice is; 0 for the root
    width: int  # choices of each head that are in use

    @classmethod
    def from_tree(cls, tree: TokenTree, device: torch.device | str = "cpu") -> Pool:
        """Make ``tree`` the pool, on ``device``."""
        tensors, width = TreeTensors.from_tree(tree, device), max(tree.head_widths)
        choices = torch.full((tree.num_nodes, tree.max_depth), -1)
        for node, path in enumerate(tree.paths, start=1):
            choices[node, : len(path)] = torch.tensor(path)
        places = choices.clamp_min(0) + width * torch.arange(tree.max_depth)  # [M, D]
        depths = torch.tensor(tree.depths)
        last = places.gather(1, (depths - 1).clamp_min(0)[:, None]).squeeze(1)
        return cls(
            tensors=tensors,
            places=places.T.contiguous().to(device),
            on_path=(choices >= 0).T.contiguous().to(device),
            last_place=last.to(device),
            width=width,
        )

    @property
    def num_nodes(self) -> int:
        """M, root included."""
        return self.tensors.num_nodes

    def survival(self, log_confidence: Tensor) -> Tensor:
        """Log-survival of every node: float32 [B, <= D, width], all <= 0, -> float32 [B, M].

        Terms are added from the root on, so that a child is never above its parent, not even by
        rounding. -inf is a choice that can't be right, or one deeper than there are confidences.
        """
        flat, depth = log_confidence.flatten(1), log_confidence.shape[1]
        total = flat.new_zeros((flat.shape[0], self.num_nodes))
        for places, on_path in zip(self.places[:depth], self.on_path[:depth], strict=True):
            total = total + flat[:, places].masked_fill(~on_path, 0.0)
        if depth < len(self.places):
            total = total.masked_fill(self.tensors.depths > depth, -float("inf"))
        return total

    def best(self, survival: Tensor, num_nodes: int) -> Tensor:
        """The nodes of the highest survival, best first: float32 [B, M] -> int64 [B, num_nodes].

        The root, whose survival is 1, is always the first. No host sync.
        """
        return survival.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes]

    def trees(self, order: Tensor, num_nodes: Tensor) -> TreeBatch:
        """The trees of the nodes in ``order``.

        Args:
            order: int64 [B, N], nodes of the pool, parents first, from the root (0) on. Padding
                is any node of the pool.
            num_nodes: integer [B], how many of them exist.

        """
        pool, batch, width = self.tensors, order.shape[0], order.shape[1]
        nodes = torch.arange(width, device=order.device).expand(batch, -1)
        exists = nodes < num_nodes[:, None]
        order = order.where(exists, pool.num_nodes)  # padding has a column of its own
        place = order.new_zeros((batch, pool.num_nodes + 1)).scatter_(1, order, nodes)
        inside = order.clamp_max(pool.num_nodes - 1)
        parents = place.gather(1, pool.parents[inside].clamp_min(0))
        parents[:, 0] = -1
        ancestors = pool.ancestors[inside.unsqueeze(2), inside.unsqueeze(1)]  # [B, N, N]
        ancestors &= exists.unsqueeze(1)
        return TreeBatch(
            num_nodes=num_nodes,
            parents=parents,
            depths=pool.depths[inside],
            ancestor_bits=pack_ancestors(ancestors),
            ancestors=ancestors,
            max_depth=pool.max_depth,
        )


def parents_within(parents: np.ndarray, order: np.ndarray) -> list[int]:
    """The parent of each draft of a chosen tree.

    Args:
        parents: int64 [M] of the pool's nodes, on the host.
        order: int64 [N] nodes of the pool, root first, parents first; see `Pool.trees`.

    """
    place = np.zeros(len(parents), dtype=np.int64)
    place[order] = np.arange(len(order))
    found: list[int] = place[parents[order[1:]]].tolist()
    return found
