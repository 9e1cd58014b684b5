"""Which nodes of the pool each request's drafts are, from their proposal to their verification.

By the request's slot in vLLM's state, where its draft tokens lie too: whoever schedules needs to
know counts only, and nothing waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_medusa.tree import TreeBatch
from vllm_medusa.tree.pool import Pool, parents_within


class Topologies:
    """The last proposal of every slot; at first the pool's own first nodes."""

    def __init__(self, pool: Pool, num_nodes: int, max_num_reqs: int) -> None:
        self.pool = pool
        self._parents = pool.tensors.parents.cpu().numpy()  # int64 [M]
        nodes = torch.arange(num_nodes, device=pool.tensors.parents.device)
        with torch.inference_mode(False):  # else only inference mode could write to it
            self.order = nodes.repeat(max_num_reqs, 1)  # int64 [slots, N], see `Pool.trees`

    def keep(self, slots: Tensor, order: Tensor) -> None:
        """Keep new proposals, int64 [B, N], of the requests in ``slots`` (int64 [B])."""
        self.order.index_copy_(0, slots, order)

    def parents(self, order: np.ndarray) -> list[int]:
        """The parent of each draft of a proposal that is on the host, root first."""
        return parents_within(self._parents, order)

    def trees(self, slots: Tensor, width: int, num_nodes: Tensor) -> TreeBatch:
        """The first ``num_nodes`` (integer [B]) nodes of what was kept, ``width`` nodes wide."""
        return self.pool.trees(self.order[:, :width].index_select(0, slots), num_nodes)
