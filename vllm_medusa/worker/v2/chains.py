"""Every node's root path as a chain of rows, for kernels that find a token's history in its rows.

What they are handed for a tree of four nodes:

node      0   1     2     3            tree: 1 and 2 under 0, 3 under 1
nodes     0   0 1   0 2   0 1 3
local     0   0 1   0 1   0 1 2        a row's place in its chain, its node's depth
last      0     2     4       7        the row at which node i's chain ends
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from vllm_medusa.tree import TokenTree


@dataclass(frozen=True, eq=False)
class PathChains:
    """The chains of the first N nodes of a tree: C rows."""

    nodes: Tensor  # int64 [C]
    local: Tensor  # int32 [C]
    last: Tensor  # int64 [N]

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str = "cpu") -> PathChains:
        """Lay out the chains of all nodes."""
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents):
            paths.append([*(paths[parent] if node else ()), node])
        last = [end - 1 for end in accumulate(map(len, paths))]
        return cls(
            nodes=torch.tensor([node for path in paths for node in path], device=device),
            local=torch.tensor(
                [place for path in paths for place in range(len(path))],
                dtype=torch.int32,
                device=device,
            ),
            last=torch.tensor(last, device=device),
        )

    def prefix(self, num_rows: int, num_nodes: int) -> PathChains:
        """The chains of the first ``num_nodes`` nodes, which have ``num_rows`` rows."""
        return PathChains(self.nodes[:num_rows], self.local[:num_rows], self.last[:num_nodes])
