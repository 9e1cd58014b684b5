"""Ancestor bits against a naive walk, with every word boundary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.packing import dense_ancestors, num_words, pack_ancestors, unpack_ancestors

BOUNDARIES = [1, 2, 63, 64, 65, 127, 128, 129, 192, 256]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.one_of(st.integers(1, 20), st.sampled_from(BOUNDARIES)))
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    narrow = draw(st.booleans())  # long branches or bushy trees
    parents = [-1]
    for node in range(1, size):
        low = max(0, node - 3) if narrow else 0
        parents.append(int(torch.randint(low, node, (1,), generator=generator)))
    return parents


def naive_ancestors(parents: list[int]) -> torch.Tensor:
    dense = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for row, start in enumerate(parents):
        dense[row, row] = True
        node = start
        while node >= 0:
            dense[row, node] = True
            node = parents[node]
    return dense


@given(parent_lists())
def test_dense_ancestors_match_a_naive_walk(parents):
    assert torch.equal(dense_ancestors(torch.tensor(parents)), naive_ancestors(parents))


@given(parent_lists())
def test_round_trip(parents):
    dense = naive_ancestors(parents)
    bits = pack_ancestors(dense)
    assert bits.dtype == torch.int64
    assert bits.shape == (len(parents), num_words(len(parents)))
    assert torch.equal(unpack_ancestors(bits, len(parents)), dense)


@pytest.mark.parametrize("size", BOUNDARIES)
def test_each_bit_is_at_its_documented_position(size):
    generator = torch.Generator().manual_seed(size)
    dense = torch.rand(size, size, generator=generator) < 0.5
    bits = pack_ancestors(dense)
    assert bits.shape == (size, -(-size // 64))
    for row in range(size):
        expected = sum(1 << j for j in range(size) if dense[row, j])
        words = [int(word) % (1 << 64) for word in bits[row]]  # as unsigned
        assert sum(word << (64 * w) for w, word in enumerate(words)) == expected


def test_the_documented_example():
    parents = torch.tensor([-1, 0, 0, 1])
    assert pack_ancestors(dense_ancestors(parents)).tolist() == [[1], [3], [5], [11]]


def test_bit_63_makes_the_word_negative_and_is_read_back():
    dense = torch.eye(64, dtype=torch.bool)
    bits = pack_ancestors(dense)
    assert bits[63].tolist() == [-(2**63)]
    assert torch.equal(unpack_ancestors(bits, 64), dense)


def test_chain_of_256_requires_every_doubling():
    dense = dense_ancestors(torch.arange(-1, 255))
    assert torch.equal(dense, torch.ones(256, 256).tril().bool())


def test_padding_attends_only_itself():
    dense = dense_ancestors(torch.tensor([[-1, 0, 1, -1, -1], [-1, 0, 0, 2, 3]]))
    assert dense.shape == (2, 5, 5)
    assert torch.equal(dense[0, 3:], torch.eye(5, dtype=torch.bool)[3:])
    assert not dense[0, :3, 3:].any()
    assert torch.equal(dense[1], naive_ancestors([-1, 0, 0, 2, 3]))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_leading_dimensions(batch):
    parents = torch.tensor([-1, 0, 0, 1, 1, 2] + [5] * 64).expand(*batch, 70)
    dense = dense_ancestors(parents)
    bits = pack_ancestors(dense)
    assert dense.shape == (*batch, 70, 70)
    assert bits.shape == (*batch, 70, 2)
    assert torch.equal(unpack_ancestors(bits, 70), dense)


def test_int32_parents():
    parents = torch.tensor([-1, 0, 1], dtype=torch.int32)
    assert torch.equal(dense_ancestors(parents), torch.ones(3, 3).tril().bool())
