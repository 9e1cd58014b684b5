import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.kv import accepted_moves, copy_slots
from vllm_medusa.sampler import path_to_node
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0], [1, 0, 1]])


def test_moves_by_hand():
    slots = torch.tensor([[20, 21, 22, 23, 24, 25], [7, 8, 9, 40, 41, 42], [3, -1, -1, -1, -1, -1]])
    nodes = torch.tensor([[0, 2, 5], [0, 3, 3], [0, 0, 0]])
    src, dst = accepted_moves(slots, nodes, torch.tensor([2, 1, 0]))
    assert src.tolist() == [[22, 25], [40, 7], [3, 3]]
    assert dst.tolist() == [[21, 22], [8, 7], [3, 3]]


def test_a_batch_truncated_below_the_tree_s_depth():
    src, dst = accepted_moves(
        torch.tensor([[5, 6]]), torch.tensor([[0, 1, 1, 1]]), torch.tensor([1])
    )
    assert src.tolist() == dst.tolist() == [[6, 5, 5]]


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


def test_control_writing_while_reading_would_differ():
    """Depth 1 is read from node 1's slot after it would have been overwritten."""
    slots = torch.arange(4)[None]
    # Not a path of a parents-first tree, but it shows that all reads come first.
    src, dst = accepted_moves(slots, torch.tensor([[0, 2, 1]]), torch.tensor([2]))
    cache = torch.arange(4.0)[:, None]
    one_by_one = cache.clone()
    for s, d in zip(src.flatten(), dst.flatten(), strict=True):
        one_by_one[d] = one_by_one[s].clone()
    copy_slots(cache, src, dst)
    assert cache.flatten().tolist() == [0, 2, 1, 3]
    assert not torch.equal(cache, one_by_one)


@pytest.mark.parametrize("dims", [2, -2])
def test_a_dimension_counted_from_either_end(dims):
    cache = torch.randn(1, 2, 6, 3)
    wanted = cache.clone()
    wanted[:, :, 1] = cache[:, :, 4]
    copy_slots(cache, torch.tensor([[4]]), torch.tensor([[1]]), dims)
    assert torch.equal(cache, wanted)
