import pytest
import torch

from vllm_medusa.kv.compaction import accepted_moves, copy_slots
from vllm_medusa.kv.layers import LayerCaches, compact_layers


def test_refused():
    scattered = torch.zeros(2, 9, 3, 9, 5, 4, 7).permute(1, 5, 0, 2, 4, 3, 6)[:, :, :, :, :, 0]
    with pytest.raises(ValueError, match="3 strides; at most 2"):
        LayerCaches.of([scattered], (0, 1))


def test_all_layers_move_alike():
    torch.manual_seed(0)
    caches = [torch.randn(2, 6, 4, 3) for _ in range(3)]
    slots = torch.randperm(24)[:14].view(2, 7)
    nodes, count = torch.tensor([[0, 2, 5], [0, 1, 1]]), torch.tensor([2, 1])
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        copy_slots(cache, *accepted_moves(slots, nodes, count), (1, 2))
    before = [cache.clone() for cache in caches]
    compact_layers(LayerCaches.of(caches, (1, 2)), slots, nodes, count)
    for cache, wanted, old in zip(caches, expected, before, strict=True):
        assert torch.equal(cache, wanted)
        assert not torch.equal(cache, old)
