"""Dynamic trees that no heads would choose."""

from __future__ import annotations

import pytest
import torch

from vllm_medusa.tree.draft_trees import DraftTrees


def random_topologies(patch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Random parents-first candidates, new ones for every request and step; returns them all."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def best(self: DraftTrees, num_nodes: int) -> DraftTrees:
        place = torch.rand(self.log_survival.shape, generator=generator)
        for node in range(1, place.shape[1]):  # no node before its parent
            above = place.gather(1, self.parents[:, node, None]).squeeze(1)
            place[:, node] = torch.maximum(place[:, node], above)
        place[:, 0] = -1
        order = place.masked_fill(self.log_survival.isinf(), 2.0).sort(dim=-1, stable=True).indices
        seen.update(map(tuple, order[:, :num_nodes].tolist()))
        return self.nodes(order[:, :num_nodes]).padded(num_nodes)

    patch.setattr(DraftTrees, "best", best)
    return seen
