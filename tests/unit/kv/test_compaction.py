"""Compaction of accepted paths: slots, all layers at once, vLLM's packed CPU caches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import gather_tokens

from vllm_medusa.kv import accepted_moves, copy_slots
from vllm_medusa.kv.cpu import PackedCaches
from vllm_medusa.sampler import path_to_node
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0], [1, 0, 1]])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    last=st.lists(st.integers(0, TREE.num_nodes - 1), min_size=1, max_size=5),
    layout=st.sampled_from(["flat", "token_major", "transposed"]),
)
def test_paths_become_contiguous_and_nothing_else_changes(seed, last, layout):
    """Scattered slots, with other requests' slots in between; every layout of a cache."""
    torch.manual_seed(seed)
    batch, n, size = len(last), TREE.num_nodes, 8
    blocks = batch + 3
    slots = torch.randperm(blocks * size)[: batch * n].view(batch, n)
    tree = TreeBatch.from_static(TreeTensors.from_tree(TREE), torch.full((batch,), n))
    path = path_to_node(tree, torch.tensor(last))
    src, dst = accepted_moves(slots, path.nodes, path.num_accepted)

    if layout == "flat":
        storage = torch.randn(2, blocks * size, 5)
        cache, dims, by_slot = storage[1], 0, lambda: storage[1]
    elif layout == "token_major":
        storage = torch.randn(2, blocks, 3, size, 4)
        cache, dims = storage[0], (0, 2)
        by_slot = lambda: storage[0].permute(0, 2, 1, 3).reshape(blocks * size, -1)  # noqa: E731
    else:
        storage = torch.randn(blocks, 3, 4, size)  # keys transposed inside each block
        cache, dims = storage, (0, 3)
        by_slot = lambda: storage.permute(0, 3, 1, 2).reshape(blocks * size, -1)  # noqa: E731

    before = by_slot().clone()
    copy_slots(cache, src, dst, dims)
    after = by_slot()
    expected = before.clone()
    for b in range(batch):
        for depth in range(int(path.num_accepted[b]) + 1):
            expected[slots[b, depth]] = before[slots[b, path.nodes[b, depth]]]
    assert torch.equal(after, expected)


SLOTS = torch.tensor([[20, 21, 22, 23, 24, 25], [99, 98, 97, 96, 0, 0], [50, 51, 52, 53, 54, 55]])
NODES = torch.tensor([[0, 2, 5], [0, 3, 3], [0, 0, 0]])
ACCEPTED = torch.tensor([2, 1, 0])


def numbered(start: int = 0) -> torch.Tensor:
    return (start + torch.arange(4.0 * 2 * 32 * 64)).view(4, 2, 32, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_all_layers_are_moved_once(isa, dtype):
    """A cache shared by two layers, and one of another shape; 22 -> 21, 25 -> 22, 96 -> 98."""
    caches = [numbered(), numbered(7), numbered(9).view(4, 1, 32, 128)]
    caches = [(cache % 2039).to(dtype) for cache in caches]
    expected = torch.arange(4 * 32)
    expected[[21, 22, 98]] = torch.tensor([22, 25, 96])
    before = [gather_tokens(cache, isa, expected) for cache in caches]
    given = [(cache, CacheLayout.of(cache, isa)) for cache in (*caches, caches[0])]
    PackedCaches(given).compact(SLOTS, NODES, ACCEPTED)
    for cache, tokens in zip(caches, before, strict=True):
        for found, wanted in zip(
            gather_tokens(cache, isa, torch.arange(4 * 32)), tokens, strict=True
        ):
            assert torch.equal(found, wanted)
