"""Dynamic trees as no heads would choose them."""

from __future__ import annotations

import pytest
import torch

from vllm_medusa.proposer.candidates import Candidates


def random_topologies(patch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Any parents-first candidates, others for every request and step; returns them all."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def best(candidates: Candidates, num_nodes: int) -> torch.Tensor:
        value, parents = candidates.value, candidates.parents
        place = torch.rand(value.shape, generator=generator)
        for node in range(1, value.shape[1]):  # no node before its parent
            above = place.gather(1, parents[:, node, None]).squeeze(1)
            place[:, node] = torch.maximum(place[:, node], above)
        place[:, 0] = -1
        order = place.masked_fill(value.isinf(), 2.0).sort(dim=-1, stable=True).indices
        seen.update(map(tuple, order[:, :num_nodes].tolist()))
        return order[:, :num_nodes]

    patch.setattr(Candidates, "best", best)
    return seen
