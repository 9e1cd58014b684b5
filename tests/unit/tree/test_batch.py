"""Trees as tensors: ancestor bits against a naive walk, static trees, ragged batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.in_torch import unpack_ancestors
from support.random_trees import random_parents

from vllm_medusa.tree.ancestors import dense_ancestors, pack_ancestors
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.presets import load_preset
from vllm_medusa.tree.topology import TokenTree

BOUNDARIES = [1, 2, 63, 64, 65, 127, 128, 129, 192, 256]
parent_lists = st.builds(
    lambda size, seed, shape: random_parents(size, torch.Generator().manual_seed(seed), shape),
    st.one_of(st.integers(1, 20), st.sampled_from(BOUNDARIES)),
    st.integers(0, 2**31 - 1),
    st.sampled_from(("random", "deep", "chain")),
)


def naive_ancestors(parents: list[int]) -> torch.Tensor:
    dense = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, start in enumerate(parents):
        dense[row, row] = True
        node = start
        while node >= 0:
            dense[row, node] = True
            node = parents[node]
    return dense


@given(parent_lists, st.integers(0, 3))
def test_dense_ancestors_match_a_naive_walk(parents, padding):
    """Padding attends only to itself."""
    parents = parents + [-1] * padding
    found = dense_ancestors(torch.tensor([parents, [-1] * len(parents)]))
    assert torch.equal(found[0], naive_ancestors(parents))
    assert torch.equal(found[1], torch.eye(len(parents), dtype=torch.bool))


@pytest.mark.parametrize("size", BOUNDARIES)
def test_each_bit_is_at_its_documented_position(size):
    generator = torch.Generator().manual_seed(size)
    dense = torch.rand(size, size, generator=generator) < 0.5
    bits = pack_ancestors(dense)
    assert bits.shape == (size, -(-size // 64))
    assert torch.equal(unpack_ancestors(bits, size), dense)
    for row in range(size):
        expected = sum(1 << j for j in range(size) if dense[row, j])
        words = [int(word) % (1 << 64) for word in bits[row]]  # as unsigned
        assert sum(word << (64 * w) for w, word in enumerate(words)) == expected


@pytest.mark.parametrize(
    "tree",
    [TokenTree.chain(1), TokenTree.dense([3, 2]), load_preset("mc_sim_7b_63"), TokenTree.chain(64)],
    ids=lambda tree: f"{tree.num_nodes} nodes",
)
def test_tensors_describe_the_tree(tree):
    tensors = TreeTensors.from_tree(tree, "cpu")
    assert tensors.num_nodes == tree.num_nodes
    assert tensors.parents.tolist() == list(tree.parents)
    assert tensors.depths.tolist() == list(tree.depths)
    assert (tensors.max_depth, tensors.width) == (tree.max_depth, max(tree.head_widths, default=0))
    for name in ("parents", "depths", "places", "ancestor_bits"):
        assert getattr(tensors, name).dtype == torch.int64
    assert torch.equal(unpack_ancestors(tensors.ancestor_bits, tree.num_nodes), tensors.ancestors)
    assert tensors.ancestors.sum(1).tolist() == [depth + 1 for depth in tree.depths]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batch_shares_the_memory_of_the_tree(dtype):
    tensors = TreeTensors.from_tree(TokenTree.dense([3, 2]))
    batch = TreeBatch.from_static(tensors, torch.tensor([10, 1, 4], dtype=dtype))
    assert (batch.batch_size, batch.max_nodes, batch.max_depth) == (3, 10, 2)
    for name in ("parents", "depths", "ancestor_bits", "ancestors"):
        ours, shared = getattr(batch, name), getattr(tensors, name)
        assert ours.shape == (3, *shared.shape)
        assert ours.data_ptr() == shared.data_ptr()
        assert ours.stride(0) == 0
    assert batch.valid.sum(1).tolist() == [10, 1, 4]
    assert batch.valid[2].tolist() == [True] * 4 + [False] * 6
    assert batch.cu_num_nodes.tolist() == [0, 10, 11, 15]
    assert batch.cu_num_nodes.dtype == dtype


def test_num_nodes_may_change_in_place():
    tensors = TreeTensors.from_tree(TokenTree.chain(2))
    num_nodes = torch.tensor([1])  # a persistent buffer, as graph capture needs
    batch = TreeBatch.from_static(tensors, num_nodes)
    assert batch.valid.tolist() == [[True, False, False]]
    num_nodes.fill_(3)
    assert batch.valid.tolist() == [[True, True, True]]
    assert batch.cu_num_nodes.tolist() == [0, 3]


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 128, 129])
def test_a_prefix_of_the_tensors_is_the_truncated_tree(size):
    tree = TokenTree.dense([4, 4, 3, 1])  # 4 + 16 + 48 + 48 drafts, and the root
    tree = TokenTree.from_paths([*tree.paths, *[(rank,) for rank in range(4, 20)]])
    tensors = TreeTensors.from_tree(tree).prefix(size)
    expected = TreeTensors.from_tree(tree.prefix(size))
    for name in ("parents", "depths", "ancestor_bits", "ancestors"):
        assert torch.equal(getattr(tensors, name), getattr(expected, name)), name
    assert tensors.num_nodes == size
    assert tensors.max_depth == tree.max_depth  # still an upper bound


def test_select_returns_whole_trees_in_the_given_order():
    tensors = TreeTensors.from_tree(TokenTree.dense([3, 2]))
    batch = TreeBatch.from_static(tensors, torch.tensor([10, 1, 4]))
    picked = batch.select(torch.tensor([2, 0]))
    assert picked.num_nodes.tolist() == [4, 10]
    assert (picked.batch_size, picked.max_nodes, picked.max_depth) == (2, 10, 2)
    for name in ("parents", "depths", "ancestor_bits", "ancestors"):
        assert torch.equal(getattr(picked, name), getattr(batch, name)[[2, 0]]), name


def test_some_requests_may_have_other_trees():
    """The others keep theirs; padding attends only to itself."""
    tensors = TreeTensors.from_tree(TokenTree.dense([2, 2]))
    batch = tensors.batch(5, torch.tensor([5, 1, 3]))
    parents = torch.tensor([[-1, 0, 1, 2, 0], [-1, 0, 0, -1, -1]])
    mixed = batch.with_trees(torch.tensor([2, 1]), parents, torch.tensor([5, 3]))
    assert mixed.num_nodes.tolist() == [5, 3, 5]
    assert mixed.depths.tolist()[1:] == [[0, 1, 1, 0, 0], [0, 1, 2, 3, 1]]
    assert torch.equal(mixed.parents[1:], parents.flip(0))
    for name in ("parents", "depths", "ancestors", "ancestor_bits"):
        assert torch.equal(getattr(mixed, name)[0], getattr(batch, name)[0])
    assert torch.equal(mixed.ancestors[1:], dense_ancestors(parents.flip(0)))
    assert torch.equal(unpack_ancestors(mixed.ancestor_bits, 5), mixed.ancestors)
    assert batch.num_nodes.tolist() == [5, 1, 3]
