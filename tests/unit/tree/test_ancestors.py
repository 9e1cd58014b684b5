"""Ancestor bits against a naive walk, with every word boundary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.random_trees import random_parents

from vllm_medusa.tree.ancestors import dense_ancestors, pack_ancestors, unpack_ancestors

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


@given(parent_lists)
def test_dense_ancestors_match_a_naive_walk(parents):
    assert torch.equal(dense_ancestors(torch.tensor(parents)), naive_ancestors(parents))


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


def test_padding_attends_only_itself():
    dense = dense_ancestors(torch.tensor([[-1, 0, 1, -1, -1], [-1, 0, 0, 2, 3]]))
    assert dense.shape == (2, 5, 5)
    assert torch.equal(dense[0, 3:], torch.eye(5, dtype=torch.bool)[3:])
    assert not dense[0, :3, 3:].any()
    assert torch.equal(dense[1], naive_ancestors([-1, 0, 0, 2, 3]))
    assert torch.equal(unpack_ancestors(pack_ancestors(dense), 5), dense)
