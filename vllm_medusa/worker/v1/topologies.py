"""Which nodes of the pool each request's drafts are, from their proposal to their verification.

A request may be verified some steps after it was drafted for, and vLLM may cut its drafts to a
prefix; whatever else becomes of it, no other request's topology may serve.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree import TreeBatch
from vllm_medusa.tree.pool import Pool, parents_within


class Topologies:
    """The last proposal of every request that goes on."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._orders: dict[str, np.ndarray] = {}  # int64 [N], see `Pool.trees`
        self._parents = pool.tensors.parents.numpy()  # int64 [M]

    def keep(self, req_ids: Sequence[str], order: Tensor, alive: Container[str]) -> None:
        """Keep new proposals, int64 [B, N]; forget requests that are not ``alive``."""
        if len(self._orders) > 2 * len(req_ids) + 64:
            self._orders = {name: row for name, row in self._orders.items() if name in alive}
        self._orders.update(zip(req_ids, order.numpy(), strict=True))

    def nodes(self, req_id: str, num_nodes: int) -> np.ndarray:
        """int64 [num_nodes]: the pool's nodes in the first part of a request's tree."""
        return self._orders[req_id][:num_nodes]

    def parents(self, req_id: str, num_nodes: int) -> list[int]:
        """The parent of each draft in the first part of a request's tree."""
        return parents_within(self._parents, self.nodes(req_id, num_nodes))

    def trees(self, req_ids: Sequence[str], width: int, num_nodes: Tensor) -> TreeBatch:
        """The trees of requests whose ``num_nodes`` (int64 [B]) are 1 for lone roots."""
        order = np.zeros((len(req_ids), width), dtype=np.int64)
        for row, (req_id, count) in enumerate(zip(req_ids, num_nodes.tolist(), strict=True)):
            if count > 1:
                order[row, :count] = self.nodes(req_id, count)
        return self.pool.trees(torch.from_numpy(order), num_nodes)
