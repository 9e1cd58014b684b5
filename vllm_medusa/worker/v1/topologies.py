"""The topology of each request's drafts, from their proposal to their verification.

A request may be verified some steps after it was drafted for, and vLLM may cut its drafts to a
prefix; whatever else becomes of it, no other request's topology may serve.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree import TreeBatch


def depth_of(parents: Sequence[int]) -> int:
    """Depth of a tree, from the parents of its drafts."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


class Topologies:
    """The last proposal of every request that goes on."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._parents: dict[str, np.ndarray] = {}  # int64 [N], see `Proposal`
        self._deeper: dict[str, int] = {}  # depth of trees that may be deeper than that

    def keep(self, req_ids: Sequence[str], parents: Tensor, alive: Container[str]) -> None:
        """Keep new proposals, int64 [B, N]; forget requests that are not ``alive``."""
        if len(self._parents) > 2 * len(req_ids) + 64:
            self._parents = {name: row for name, row in self._parents.items() if name in alive}
            self._deeper = {name: each for name, each in self._deeper.items() if name in alive}
        self._parents.update(zip(req_ids, parents.numpy(), strict=True))
        for req_id in req_ids if self._deeper else ():
            self._deeper.pop(req_id, None)

    def put(self, req_id: str, parents: np.ndarray, depth: int) -> None:
        """Keep a tree of any depth for a request, int64 [N], in place of the one there was."""
        self._parents[req_id], self._deeper[req_id] = parents, depth

    def first(self, req_id: str, num_nodes: int) -> np.ndarray:
        """int64 [num_nodes]: the parents in the first part of a request's tree, -1 of the root."""
        return self._parents[req_id][:num_nodes]

    def parents(self, req_id: str, num_nodes: int) -> list[int]:
        """The same of the drafts alone."""
        found: list[int] = self.first(req_id, num_nodes)[1:].tolist()
        return found

    def trees(self, req_ids: Sequence[str], width: int, num_nodes: Tensor) -> TreeBatch:
        """The trees of requests whose ``num_nodes`` (int64 [B]) are 1 for lone roots."""
        parents = np.zeros((len(req_ids), width), dtype=np.int64)
        parents[:, 0] = -1
        max_depth = self._max_depth
        for row, (req_id, count) in enumerate(zip(req_ids, num_nodes.tolist(), strict=True)):
            if count > 1:
                parents[row, :count] = self.first(req_id, count)
                max_depth = max(max_depth, min(self._deeper.get(req_id, 0), count - 1))
        return TreeBatch.from_parents(torch.from_numpy(parents), num_nodes, max_depth)
