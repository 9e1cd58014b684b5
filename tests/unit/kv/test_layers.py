import pytest
import torch

from vllm_medusa.kv.compaction import accepted_moves, copy_slots
from vllm_medusa.kv.layers import LayerCaches, compact_layers


@pytest.mark.parametrize(
    ("shape", "order", "dims", "outer", "run"),
    [
        # all of bfloat16: a word is 4 elements where runs and strides allow it
        ((9, 4, 2, 8), (0, 1, 2, 3), (0, 1), ((1, 0), (1, 0)), 4),
        ((2, 9, 4, 2, 8), (0, 1, 2, 3, 4), (1, 2), ((1, 0), (2, 144)), 4),
        ((9, 2, 4, 2, 8), (0, 1, 2, 3, 4), (0, 2), ((1, 0), (2, 16)), 4),
        ((2, 9, 4, 2, 8), (0, 1, 3, 2, 4), (1, 2), ((2, 144), (2, 8)), 2),
        ((9, 4, 2, 8), (0, 2, 1, 3), (0, 1), ((1, 0), (2, 8)), 2),
        ((9, 4, 2, 8), (0, 2, 3, 1), (0, 1), ((1, 0), (16, 4)), 1),
        ((36, 16), (0, 1), 0, ((1, 0), (1, 0)), 4),
        ((36, 1, 3), (0, 1, 2), 0, ((1, 0), (1, 0)), 3),
    ],
)
def test_slots_as_contiguous_runs(shape, order, dims, outer, run):
    memory = torch.zeros([shape[i] for i in order], dtype=torch.bfloat16)
    cache = memory.permute([order.index(i) for i in range(len(order))])
    assert cache.shape == shape
    layers = LayerCaches.of([cache, torch.empty_like(cache)], dims)
    assert (layers.outer, layers.run) == (outer, run)
    assert layers.addresses.tolist() == [c.data_ptr() for c in layers.caches]


def test_words_are_as_wide_as_alignment_allows():
    memory = torch.zeros(8 + 9 * 16, dtype=torch.bfloat16)
    for start, length, word in ((0, 16, torch.int64), (2, 16, torch.int32), (1, 16, torch.int16)):
        cache = memory[start : start + 9 * length].view(9, length)
        assert LayerCaches.of([memory[: 9 * length].view(9, length), cache]).word is word
    assert LayerCaches.of([memory[: 9 * 6].view(9, 6)]).word is torch.int32
    assert LayerCaches.of([memory[: 9 * 3].view(9, 3)]).word is torch.int16
    assert LayerCaches.of([memory[: 9 * 16].view(9, 16)[:, :6]]).word is torch.int32
    odd = torch.zeros(9, 3, dtype=torch.uint8)
    assert LayerCaches.of([odd]).word is torch.int8


def test_refused():
    cache = torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match="Describe layers of one kind at a time"):
        LayerCaches.of([cache, cache.double()], (0, 1))
    with pytest.raises(ValueError, match=r"\(4, 2, 3\).*another.*\(4, 2, 4\)"):
        LayerCaches.of([torch.zeros(4, 2, 4), cache], (0, 1))
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
