"""Trees by slot: requests are verified with their stored trees; options of requests."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
import numpy as np
from support.random_trees import random_parents
from vllm import SamplingParams

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.integration.request_trees import RequestTrees, tree_drafts
from vllm_medusa.integration.requests import RequestOptions
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import DynamicTree

SLOTS, DEPTH = 5, 7


def make_trees(**changes):
    tree = DynamicTree(TokenTree.chain(DEPTH), 8)
    options = TreeSettings(None, None, tree, AcceptanceConfig(), 7)
    config = SimpleNamespace(
        additional_config={"medusa": options.to_dict()},
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        model_config=SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 9),
    )
    return RequestTrees(
        config, SimpleNamespace(tree=None, scratch=0), torch.device("cpu"), **changes
    )


def parents(*seeds):
    """Random trees of 8 nodes, parents first."""
    generators = map(torch.Generator().manual_seed, seeds)
    return torch.tensor([random_parents(8, generator) for generator in generators])


def same(one, other):
    for name in ("num_nodes", "parents", "depths", "ancestors", "ancestor_bits"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_each_slot_keeps_its_topology_until_replaced():
    trees = make_trees()
    place, first, later = trees.parents.data_ptr(), parents(1, 2, 3), parents(4)
    trees.keep(torch.tensor([4, 0, 2]), first)
    trees.keep(torch.tensor([0]), later)
    counts = torch.tensor([8, 5, 3])
    got = trees.topologies(torch.tensor([2, 0, 4]), 8, counts)
    expected = torch.stack([first[2], later[0], first[0]])
    same(got, TreeBatch.from_parents(expected, counts, DEPTH))
    cut = trees.topologies(torch.tensor([2, 0]), 3, torch.tensor([3, 1]))
    same(cut, TreeBatch.from_parents(expected[:2, :3], torch.tensor([3, 1]), DEPTH))
    assert trees.parents.data_ptr() == place
    never = trees.topologies(torch.tensor([3]), 8, torch.tensor([8]))
    assert never.parents[0].tolist() == [-1] + [0] * 7


@pytest.mark.parametrize("on_host", [False, True])
def test_a_step_uses_the_schedulers_trees_if_given(on_host):
    trees, kept = make_trees(on_host=on_host), parents(1, 2)
    trees.keep(torch.tensor([1, 2]), kept)
    trees.chosen_parents = {"b": [0, 1, 2, 3]}
    nodes, rows = np.array([8, 5]), torch.arange(13)
    cu_nodes = torch.tensor([0, 8, 13])
    step = trees.begin(torch.tensor([1, 2]), ["a", "b"], nodes, cu_nodes, rows, rows)
    assert step.tree.parents[0].tolist() == kept[0].tolist()
    assert step.tree.parents[1, :5].tolist() == [-1, 0, 1, 2, 3]
    assert step.tree.max_depth == (4 if on_host else DEPTH)
    positions = torch.zeros(13, dtype=torch.int64)
    trees.write_positions(positions, torch.tensor([10, 20]))
    assert positions[8:].tolist() == [20, 21, 22, 23, 24]
    ones = np.ones(2, dtype=np.int64)
    assert trees.begin(torch.tensor([1, 2]), ["a", "b"], ones, cu_nodes, rows, rows) is None


def test_drafts_for_the_scheduler():
    drafts = DraftTrees.of(
        torch.tensor([[9, 1, 2, 3], [9, 4, 5, 6], [9, 7, 8, 0]]),
        torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]]),
        torch.tensor([[1.0, 0.5, 0.25, 0.0], [1.0, 0.5, 0.25, 0.125], [1.0, 0.0, 0.0, 0.0]]).log(),
    )
    drafts.source[0, 2] = 2
    found = tree_drafts(drafts, ["a", "b", "c"], [False, True, True])
    assert found.draft_token_ids == [[1, 2], [], []] and found.survival == [[0.5, 0.25], [], []]
    assert found.proposed_by == {"a": [0, 2]} and list(found.candidates) == ["b"]
    assert found.candidates["b"].token_ids == [4, 5, 6]
    assert found.candidates["b"].parents == [0, 1, 2]


def test_useful_depth_of_requests():
    """Tokens left of max_tokens or of the model's length, minus the one that needs no node."""
    options = RequestOptions(SLOTS, AcceptanceConfig(), 100, torch.device("cpu"))
    options.add(0, SamplingParams(max_tokens=10), 20)
    options.add(1, SamplingParams(max_tokens=500), 20)
    options.add(2, SamplingParams(max_tokens=10), 95)
    slots, lengths = np.array([2, 1, 0, 0]), torch.tensor([96, 50, 29, 30])
    assert options.useful_depth(slots, lengths).tolist() == [3, 49, 0, 0]
    assert options.useful_depth(np.array([0]), torch.tensor([21])).tolist() == [8]
    options.add(0, SamplingParams(extra_args={"medusa": {"max_draft_tokens": 0}}), 20)
    assert options.useful_depth(np.array([0]), torch.tensor([21])).tolist() == [0]


def options_of(params):
    options = RequestOptions(SLOTS, AcceptanceConfig(), 100, torch.device("cpu"))
    options.add(2, params, 20)
    return options


@pytest.mark.parametrize(
    ("changes", "by_path"),
    [
        ({"min_tokens": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"_bad_words_token_ids": [[3, 4]]}, True),
    ],
)
def test_sampling_parameters_that_depend_on_earlier_tokens(changes, by_path):
    params = SamplingParams()
    for name, value in changes.items():
        setattr(params, name, value)
    assert options_of(params).by_path(np.array([1, 2])).tolist() == [False, by_path]


def test_requests_that_sample():
    """vLLM raises temperatures above 0 to at least 0.01."""
    for temperature, sampled in ((0.0, False), (0.01, True)):
        options = options_of(SamplingParams(temperature=temperature))
        assert options.may_copy(np.array([2])).tolist() == [[True], [sampled]]
