"""Layout of one scheduled step: the rows of each request's nodes.

The runner flattens the tokens of all requests to T rows. A request that verifies a
tree occupies ``1 + drafts`` contiguous rows, its root first; any other request counts as a tree
of one node, its last row. *Logits rows* are only these rows, request by request:

    request          a (prefill of 4)   b (3 drafts)   c (plain decode)
    rows             0 1 2 3            4 5 6 7        8
    logits rows            0            1 2 3 4        5          cu_nodes = [0, 1, 5, 6]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeBatch

# (width, counts int64 [B]) -> the step's trees, `width` nodes wide
Trees = Callable[[int, Tensor], TreeBatch]


@dataclass(eq=False)
class TreeStep:
    """The trees of one step; built once, before the forward pass."""

    tree: TreeBatch
    num_nodes: np.ndarray  # int64 [B], root included; 1: no drafts
    cu_nodes: Tensor  # int64 [B + 1] first logits row of each request
    rows: Tensor  # int64 [sum of num_nodes] token row of every logits row
    row_of_node: Tensor  # int64 [B, N] logits row of each node; padding repeats the last node
    token_ids: Tensor  # int64 [B, N], root included; -1: a placeholder, not a draft
    slot_mappings: dict[int, Tensor] = field(default_factory=dict)  # KV group -> [T]

    @classmethod
    def build(
        cls,
        trees: Trees,
        num_nodes: np.ndarray,  # int64 [B], number of nodes each request verifies
        cu_nodes: Tensor,  # integer [B + 1], first logits row of each request
        rows: Tensor,  # integer [sum of num_nodes], the runner's logits indices
        input_ids: Tensor,  # integer [T], the scheduled tokens, placeholders not yet replaced
    ) -> TreeStep:
        """Lay out a step, without host copies or syncs."""
        cu_nodes, rows = cu_nodes.to(torch.int64), rows.to(torch.int64)
        counts = cu_nodes[1:] - cu_nodes[:-1]
        width = int(num_nodes.max())
        nodes = torch.arange(width, device=rows.device)
        row_of_node = cu_nodes[:-1, None] + torch.minimum(nodes, counts[:, None] - 1)
        return cls(
            tree=trees(width, counts),
            num_nodes=num_nodes,
            cu_nodes=cu_nodes,
            rows=rows,
            row_of_node=row_of_node,
            token_ids=input_ids[rows].to(torch.int64)[row_of_node],
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.num_nodes)

    @functools.cached_property
    def needs_mask(self) -> np.ndarray:
        """Bool [B]: the request's nodes are not a chain, so plain causal attention is not enough.

        Reads the trees on the host.
        """
        parents, counts = self.tree.parents.numpy(), self.num_nodes[:, None]
        nodes = np.arange(parents.shape[1])
        needed: np.ndarray = ((parents != nodes - 1) & (nodes < counts)).any(1)
        return needed

    @property
    def root_rows(self) -> Tensor:
        """int64 [B]: the token row of each root."""
        return self.rows[self.cu_nodes[:-1]]

    def slots(self, group: int) -> Tensor:
        """int64 [B, N]: the KV slot each node was written to in a KV cache group."""
        return self.slot_mappings[group][self.rows][self.row_of_node]


def ragged_rows(
    cu_num_nodes: Tensor,  # integer [B + 1], from 0
    num_rows: int,
) -> tuple[Tensor, Tensor]:  # int64 [num_rows], int64 [num_rows]
    """Request and node of each row of the flattened batch.

    ``num_rows`` is ``cu_num_nodes[-1]``, known to the caller without a sync. For
    ``cu_num_nodes`` = [0, 3, 4] the result is ([0, 0, 0, 1], [0, 1, 2, 0]).
    """
    rows = torch.arange(num_rows, device=cu_num_nodes.device)
    starts = cu_num_nodes.to(torch.int64)
    request = torch.searchsorted(starts[1:], rows, right=True)
    return request, rows - starts[request]


def write_node_positions(
    positions: Tensor,  # integer [>= T], written in place
    base: Tensor,  # integer [B]
    step: TreeStep,
) -> None:
    """Write each node's RoPE position: context length plus depth, never plus index. No host sync.

    Other rows keep their values.
    """
    request, node = ragged_rows(step.cu_nodes, len(step.rows))
    values = base[request] + step.tree.depths[request, node]
    positions.index_copy_(0, step.rows, values.to(positions.dtype))
