"""Dynamic trees as no heads would choose them."""

from __future__ import annotations

import pytest
import torch

from vllm_medusa.tree.pool import Pool


def random_topologies(patch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Any parents-first part of the pool, another for every request and step; returns them all."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def best(pool: Pool, survival: torch.Tensor, num_nodes: int) -> torch.Tensor:
        place, parents = torch.rand(survival.shape, generator=generator), pool.tensors.parents
        for node in range(1, pool.num_nodes):  # no node before its parent
            place[:, node] = torch.maximum(place[:, node], place[:, parents[node]])
        place[:, 0] = -1
        order = place.masked_fill(survival.isinf(), 2.0).sort(dim=-1, stable=True).indices
        seen.update(map(tuple, order[:, :num_nodes].tolist()))
        return order[:, :num_nodes]

    patch.setattr(Pool, "best", best)
    return seen
