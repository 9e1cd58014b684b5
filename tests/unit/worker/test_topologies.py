"""Topologies by slot on the V2 runner: what was kept for a request is what it is verified by."""

import random

import pytest
import torch

pytest.importorskip("vllm")
import numpy as np

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.tree import TreeBatch

SLOTS, DEPTH = 5, 3


@pytest.fixture
def topologies():
    from vllm_medusa.worker.v2.topologies import Topologies

    return Topologies(DEPTH, 8, SLOTS, "cpu")


def parents(*seeds):
    """Random trees of 8 nodes, parents first."""
    rows = []
    for seed in seeds:
        rng, row, depths = random.Random(seed), [-1], [0]
        while len(row) < 8:
            parent = rng.randrange(len(row))
            if depths[parent] < DEPTH:
                row.append(parent)
                depths.append(depths[parent] + 1)
        rows.append(row)
    return torch.tensor(rows)


def same(one, other):
    for name in ("num_nodes", "parents", "depths", "ancestors", "ancestor_bits"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_each_slot_has_its_own_until_it_is_renewed(topologies):
    first, later = parents(1, 2, 3), parents(4)
    topologies.keep(torch.tensor([4, 0, 2]), first)
    topologies.keep(torch.tensor([0]), later)
    counts = torch.tensor([8, 5, 3])
    got = topologies.trees(torch.tensor([2, 0, 4]), 8, counts)
    expected = torch.stack([first[2], later[0], first[0]])
    same(got, TreeBatch.from_parents(expected, counts, DEPTH))
    cut = topologies.trees(torch.tensor([2, 0]), 3, torch.tensor([3, 1]))
    same(cut, TreeBatch.from_parents(expected[:2, :3], torch.tensor([3, 1]), DEPTH))


def test_nothing_moves_and_a_slot_never_drafted_for_has_a_tree(topologies):
    place = topologies.parents.data_ptr()
    topologies.keep(torch.tensor([1]), parents(7))
    assert topologies.parents.data_ptr() == place
    tree = topologies.trees(torch.tensor([3]), 8, torch.tensor([8]))
    assert tree.parents[0].tolist() == [-1] + [0] * 7


def test_useful_depth_of_requests():
    """Tokens left of max_tokens or of the model's length, less the one that needs no node."""
    from vllm import SamplingParams

    from vllm_medusa.worker.v2.requests import RequestOptions

    options = RequestOptions(SLOTS, AcceptanceConfig(), 100, torch.device("cpu"))
    options.add(0, SamplingParams(max_tokens=10), 20)
    options.add(1, SamplingParams(max_tokens=500), 20)
    options.add(2, SamplingParams(max_tokens=10), 95)
    slots, lengths = np.array([2, 1, 0, 0]), torch.tensor([96, 50, 29, 30])
    assert options.useful_depth(slots, lengths).tolist() == [3, 49, 0, 0]
    assert options.useful_depth(np.array([0]), torch.tensor([21])).tolist() == [8]
