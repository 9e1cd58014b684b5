r"""Dynamic trees: every request, every step, the best part of one large static tree.

The *pool* is a static tree of many nodes, more than anyone verifies. A step scores each of its
nodes by its *survival*, the estimated probability that the walk gets there: the product of the
confidences on the node's path (EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.1, on Medusa's
marginals). The N nodes of the highest survival are the tree of the step; budgets and shares are
mere counts, as every cut of a chosen tree is the best tree of its size (`proposer.candidates`).

    pool      0          survival (log)        chosen, N = 3
             / \         0                     0
            1   2        -0.2  -1.8            1   node 1 of the tree
           / \           -0.5  -3.0            3   node 2, its parent is node 1
          3   4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeTensors
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
