import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.walks_by_hand import steps_of

from vllm_medusa.calibration.search import walk_taus, walked_tree
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.tree import DEFAULT_TREE, TokenTree

HEADS = 3
TREES = (
    TokenTree.dense([2, 2, 1]).paths,
    TokenTree.chain(3).paths,
    ((1,), (1, 2), (0,), (1, 2, 0)),
    ((0,),),
)


def random_texts(seed):
    rng = np.random.default_rng(seed)
    shapes = [(int(rng.integers(0, 30)), HEADS) for _ in range(5)] + [(7, HEADS)]
    return [rng.integers(-1, 3, shape) for shape in shapes]  # -1: a token never written


@given(st.integers(0, 10**6), st.sampled_from(TREES))
@settings(max_examples=60)
def test_visits_and_tau_are_those_of_walks_by_hand(seed, tree):
    texts = random_texts(seed)
    walks = Walks(texts, tree)
    paths = [path for text in texts for _, path in steps_of(text, tree)]
    assert walks.tau() == pytest.approx(sum(1 + len(path) for path in paths) / len(paths))
    for node, visits in zip([(), *tree], walks.visits(), strict=True):
        assert visits == sum(path[: len(node)] == node for path in paths)
    assert len(walks.visited()) == len(paths)


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_leaf_tried_gives_what_it_gives_when_added(seed):
    walks = Walks(random_texts(seed), [(0,)])
    leaves = [(1,), (0, 1)]
    tried = walks.tau_with(leaves)
    for leaf, tau in zip(leaves, tried, strict=True):
        assert Walks(random_texts(seed), [(0,), leaf]).tau() == tau


def test_every_prefix_of_a_tree():
    texts = [np.random.default_rng(0).integers(0, 3, (50, 4)) for _ in range(3)]
    paths = walked_tree(texts, 9, 3)
    taus = [Walks(texts, paths[:size]).tau() for size in (1, 4, 9)]
    assert walk_taus(texts, paths, [1, 4, 9, 99]) == [*taus, taus[-1]]
    last = walk_taus(texts, DEFAULT_TREE.paths, [14])[0]
    assert last == walk_taus(texts, DEFAULT_TREE.paths, [3, 7, 14])[2]


def test_a_token_never_written_is_a_miss_for_every_rank():
    texts = [np.array([[0, -1, -1]] * 6)]
    assert walk_taus(texts, walked_tree(texts, 9, 3), [1, 9]) == [2.0, 2.0]
    walks = Walks(texts)
    assert walks.tau_with([(0,)]) == [2.0]
