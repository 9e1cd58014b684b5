"""The topology of each request's drafts, from their proposal to their verification.

By the request's slot in vLLM's state, where its draft tokens lie too: whoever schedules needs to
know counts only, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.tree import TreeBatch


class Topologies:
    """The last proposal of every slot; at first a root with children."""

    def __init__(
        self, max_depth: int, num_nodes: int, max_num_reqs: int, device: torch.device | str
    ) -> None:
        self._max_depth = max_depth
        with torch.inference_mode(False):  # else only inference mode could write to it
            # int64 [slots, N], see `Proposal`
            self.parents = torch.zeros(max_num_reqs, num_nodes, dtype=torch.int64, device=device)
            self.parents[:, 0] = -1

    def keep(self, slots: Tensor, parents: Tensor) -> None:
        """Keep new proposals, int64 [B, N], of the requests in ``slots`` (int64 [B])."""
        self.parents.index_copy_(0, slots, parents)

    def trees(self, slots: Tensor, width: int, num_nodes: Tensor) -> TreeBatch:
        """The first ``num_nodes`` (integer [B]) nodes of what was kept, ``width`` nodes wide."""
        parents = self.parents[:, :width].index_select(0, slots)
        return TreeBatch.from_parents(parents, num_nodes, self._max_depth)
