"""Root paths as chains of rows, for kernels that read a token's history from the rows before it.

For a tree of H levels, such a kernel gets H rows for each node: its path from the root, and
padding. For nodes 1 and 2 under the root and 3 under 1, H = 3:

    node      0       1       2       3
    nodes     0 . .   0 1 .   0 2 .   0 1 3
    local     0 0 0   0 1 0   0 1 0   0 0 2    number of preceding rows in a row's history
    index     0         4       7         11   the row of the node

The host knows the number of rows, the device their owners: trees differ by request and step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.scorer.step import ragged_rows
from vllm_medusa.tree.batch import TreeBatch


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The rows in which the nodes of B requests are sampled; R rows, grouped by request."""

    rows: Tensor  # int64 [R] logits row
    local: Tensor  # int32 [R] number of preceding rows in its history
    index: Tensor  # int64 [B, N] row of each node; padding repeats the last node


def height(tree: TreeBatch) -> int:
    """H, rows of a chain: no node is deeper than its number of preceding nodes."""
    return min(tree.max_depth + 1, tree.max_nodes)


def first_rows(by_path: np.ndarray, num_nodes: np.ndarray, height: int) -> np.ndarray:
    """First row of each request: int64 [B + 1].

    The requests of ``by_path`` (bool [B]) have chains for their ``num_nodes`` (int64 [B]) nodes,
    the others one row per node.
    """
    sizes = np.where(by_path, height, 1) * num_nodes
    return np.concatenate(([0], sizes.cumsum()))


def lay_out(
    tree: TreeBatch,  # of B requests; the logits rows are all nodes, request by request
    by_path: Tensor,  # bool [B], as in `first_rows`
    first: Tensor,  # int64 [B + 1], the output of `first_rows`, on the device
    num_rows: int,  # R, its last entry
) -> RowLayout:
    """Lay out a step's rows. No host sync."""
    levels, nodes = height(tree), torch.arange(tree.max_nodes, device=first.device)
    # The ancestor of each node at each level; non-ancestors go to an extra column, removed below.
    level = torch.where(tree.ancestors, tree.depths.unsqueeze(1), levels).clamp_max(levels)
    paths = nodes[:, None].expand(tree.batch_size, -1, levels + 1)
    paths = paths.scatter(2, level, nodes.expand_as(level))[..., :levels]  # [B, N, H]
    request, place = ragged_rows(first, num_rows)
    chained = by_path[request]
    node = torch.where(chained, place // levels, place)
    step = torch.where(chained, place % levels, 0)
    depth = tree.depths[request, node]
    ancestor = torch.where(chained, paths[request, node, step], node)
    ends = torch.where(chained, depth * (step == depth), place)
    last = torch.minimum(nodes, tree.num_nodes[:, None].to(torch.int64) - 1)  # [B, N]
    of_node = torch.where(by_path[:, None], last * levels + tree.depths.gather(1, last), last)
    starts = tree.cu_num_nodes.to(torch.int64)
    return RowLayout(
        rows=starts[request] + ancestor,
        local=ends.to(torch.int32),
        index=first[:-1, None] + of_node,
    )
