"""Root paths as chains of rows, for kernels that find a token's history in the rows before its own.

What such a kernel is handed for a tree of four nodes:

    node      0   1     2     3            tree: 1 and 2 under 0, 3 under 1
    nodes     0   0 1   0 2   0 1 3
    local     0   0 1   0 1   0 1 2        a row's place in its chain, its node's depth
    last      0     2     4       7        the row at which node i's chain ends

The number of nodes of every request is known to the host, and so is all of this: numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from vllm_medusa.tree import TokenTree


@dataclass(frozen=True, eq=False)
class RowLayout:
    """In which rows the nodes of B requests are drawn; R rows, those of a request together."""

    rows: np.ndarray  # int64 [R] logits row
    local: np.ndarray  # int32 [R] how many rows before are its history
    first: np.ndarray  # int64 [B + 1] where a request's rows start
    index: np.ndarray  # int64 [B, N] row of each node; padding repeats the last node


@dataclass(frozen=True, eq=False)
class PathChains:
    """The chains of a tree's nodes, C rows; the first nodes have the first rows."""

    nodes: np.ndarray  # int64 [C]
    local: np.ndarray  # int32 [C]
    last: np.ndarray  # int64 [N]

    @classmethod
    def of(cls, tree: TokenTree) -> PathChains:
        """Lay out the chains of all nodes."""
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents):
            paths.append([*(paths[parent] if node else ()), node])
        return cls(
            nodes=np.array([node for path in paths for node in path]),
            local=np.array([i for path in paths for i in range(len(path))], dtype=np.int32),
            last=np.array([end - 1 for end in accumulate(map(len, paths))]),
        )

    def lay_out(self, by_path: np.ndarray, num_nodes: np.ndarray) -> RowLayout:
        """Chains for the requests of ``by_path`` (bool [B]), a row for each node of the others.

        ``num_nodes`` is int64 [B]; the logits rows are those of all nodes, request by request.
        """
        rows, local, first, index = [], [], [0], []
        node = np.arange(num_nodes.max())
        starts = num_nodes.cumsum() - num_nodes
        for start, count, chained in zip(starts, num_nodes, by_path, strict=True):
            of_node = np.minimum(node, count - 1)
            if chained:
                size = self.last[count - 1] + 1
                rows.append(start + self.nodes[:size])
                local.append(self.local[:size])
                of_node = self.last[of_node]
            else:
                rows.append(start + np.arange(count))
                local.append(np.arange(count, dtype=np.int32))
            index.append(first[-1] + of_node)
            first.append(first[-1] + len(rows[-1]))
        return RowLayout(
            np.concatenate(rows), np.concatenate(local), np.array(first), np.stack(index)
        )
