"""Trees as tensors: one static tree on a device, and the ragged trees of a batch of requests.

N is the number of nodes, root included, to which every request is padded; B is the number of
requests, W the number of 64-bit words of an ancestor row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.tree.ancestors import dense_ancestors, num_words, pack_ancestors
from vllm_medusa.tree.topology import TokenTree


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """One static tree on one device, built once: drafted whole, or the pool of dynamic trees.

    A pool has more nodes than a request verifies. A step scores all of them by survival and
    uses the best (EAGLE-2, https://arxiv.org/abs/2406.16858, section 4.1, on Medusa's marginals).
    """

    parents: Tensor  # int64 [N], -1 for the root
    depths: Tensor  # int64 [N]
    ancestor_bits: Tensor  # int64 [N, W]
    ancestors: Tensor  # bool [N, N], self included
    choices: Tensor  # int64 [D, N]: index in [D * width] choices of a path's d-th choice, or -1
    places: Tensor  # int64 [N]: index of the node's own choice; 0 for the root
    max_depth: int
    width: int  # number of choices per head

    @classmethod
    def from_tree(cls, tree: TokenTree, device: torch.device | str = "cpu") -> TreeTensors:
        """Copy ``tree`` to ``device``."""
        parents, width = torch.tensor(tree.parents), max(tree.head_widths, default=0)
        choices, places = (
            torch.full((tree.max_depth, tree.num_nodes), -1),
            torch.zeros_like(parents),
        )
        for node, path in enumerate(tree.paths, start=1):
            for depth, rank in enumerate(path):
                choices[depth, node] = places[node] = depth * width + rank
        ancestors = dense_ancestors(parents)
        return cls(
            parents=parents.to(device),
            depths=torch.tensor(tree.depths, device=device),
            ancestor_bits=pack_ancestors(ancestors).to(device),
            ancestors=ancestors.to(device),
            choices=choices.to(device),
            places=places.to(device),
            max_depth=tree.max_depth,
            width=width,
        )

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.parents.shape[0]

    def survival(self, log_confidence: Tensor) -> Tensor:
        """Log-survival of every node: float32 [B, <= D, width], all <= 0, -> float32 [B, N].

        Terms are added from the root down, so that a child is never above its parent, not even by
        rounding. -inf: a choice that can't be accepted, or one deeper than the confidences.
        """
        depth = log_confidence.shape[1]
        flat = torch.nn.functional.pad(log_confidence.flatten(1), (0, 1))  # a 0 at index -1
        total = flat.new_zeros((flat.shape[0], self.num_nodes))
        for choice in self.choices[:depth]:
            total = total + flat[:, choice]
        return (
            total if depth == self.max_depth else total.masked_fill(self.depths > depth, -torch.inf)
        )

    def batch(self, width: int, num_nodes: Tensor) -> TreeBatch:
        """The first ``width`` nodes for every request; ``num_nodes`` [B] of them exist."""
        return TreeBatch.from_static(self.prefix(width), num_nodes)

    def prefix(self, num_nodes: int) -> TreeTensors:
        """The first ``num_nodes`` nodes, as views; `max_depth` and `width` remain upper bounds."""
        if num_nodes == self.num_nodes:
            return self
        return replace(
            self,
            parents=self.parents[:num_nodes],
            depths=self.depths[:num_nodes],
            ancestor_bits=self.ancestor_bits[:num_nodes, : num_words(num_nodes)],
            ancestors=self.ancestors[:num_nodes, :num_nodes],
            choices=self.choices[:, :num_nodes],
            places=self.places[:num_nodes],
        )


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The trees of B requests, padded to N nodes each.

    Only the first ``num_nodes[b]`` nodes of request b exist. Values of padding nodes are
    unspecified: mask with `valid`. Nodes are parents first, so padding is never an ancestor of an
    existing node.
    """

    num_nodes: Tensor  # integer [B], root included; 1: no drafts
    parents: Tensor  # int64 [B, N], -1 for the root
    depths: Tensor  # int64 [B, N]
    ancestor_bits: Tensor  # int64 [B, N, W]
    ancestors: Tensor  # bool [B, N, N], self included
    max_depth: int  # upper bound of depths, known on the host

    @classmethod
    def from_static(cls, tensors: TreeTensors, num_nodes: Tensor) -> TreeBatch:
        """The same tree for every request, as views; ``num_nodes`` [B] of its nodes exist."""
        batch = num_nodes.shape[0]
        return cls(
            num_nodes=num_nodes,
            parents=tensors.parents.expand(batch, -1),
            depths=tensors.depths.expand(batch, -1),
            ancestor_bits=tensors.ancestor_bits.expand(batch, -1, -1),
            ancestors=tensors.ancestors.expand(batch, -1, -1),
            max_depth=tensors.max_depth,
        )

    @classmethod
    def from_parents(cls, parents: Tensor, num_nodes: Tensor, max_depth: int) -> TreeBatch:
        """A separate tree per request.

        Args:
            parents: int64 [B, N], parents first; -1 for the root. Padding may have any parent
                before it.
            num_nodes: integer [B], number of existing nodes.
            max_depth: Upper bound of depths.

        """
        ancestors = dense_ancestors(parents, max_depth)  # [B, N, N]
        return cls(
            num_nodes=num_nodes,
            parents=parents,
            depths=ancestors.sum(-1) - 1,
            ancestor_bits=pack_ancestors(ancestors),
            ancestors=ancestors,
            max_depth=max_depth,
        )

    def select(self, requests: Tensor) -> TreeBatch:
        """The trees of ``requests`` (int64 [Q]) as a separate batch, still N wide."""
        return replace(self, **{name: part[requests] for name, part in self._tensors().items()})

    def with_trees(self, requests: Tensor, parents: Tensor, num_nodes: Tensor) -> TreeBatch:
        """The same batch with other trees for some requests; `max_depth` is kept.

        Args:
            requests: int64 [Q].
            parents: int64 [Q, N] of their nodes, -1 for the root and padding.
            num_nodes: integer [Q].

        """
        new = TreeBatch.from_parents(parents, num_nodes, self.max_nodes)._tensors()
        own = self._tensors()
        return replace(self, **{key: own[key].index_copy(0, requests, new[key]) for key in own})

    def _tensors(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}

    @property
    def batch_size(self) -> int:
        """B."""
        return self.parents.shape[0]

    @property
    def max_nodes(self) -> int:
        """N, root and padding included."""
        return self.parents.shape[1]

    @property
    def valid(self) -> Tensor:
        """Bool [B, N]: whether the node exists or is padding."""
        nodes = torch.arange(self.max_nodes, device=self.num_nodes.device)
        return nodes < self.num_nodes.unsqueeze(1)

    @property
    def cu_num_nodes(self) -> Tensor:
        """[B + 1] first row of each request in the flattened batch, from 0; dtype of num_nodes."""
        total = self.num_nodes.cumsum(0, dtype=self.num_nodes.dtype)
        return torch.nn.functional.pad(total, (1, 0))
