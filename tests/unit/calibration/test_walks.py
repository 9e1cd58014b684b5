"""What trees accept on calibrated texts, and the search for the best tree."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.calibration.walks import Walks, walk_taus, walked_tree
from vllm_medusa.tree import TokenTree

HEADS, RANKS = 2, 3
TREES = (
    TokenTree.dense([2, 2, 1]).paths,
    TokenTree.chain(3).paths,
    ((1,), (1, 2), (0,), (1, 2, 0)),
    ((0,),),
)


def paths_by_hand(texts, tree):
    """The path accepted in each step of decoding texts, which are ranks [n, K]."""
    nodes, paths = set(tree), []
    for text in texts:
        at = 0
        while at < len(text):
            path = ()
            while len(path) < len(text[at]) and (*path, int(text[at][len(path)])) in nodes:
                path = (*path, int(text[at][len(path)]))
            paths.append(path)
            at += 1 + len(path)
    return paths


def tau_by_hand(texts, tree):
    paths = paths_by_hand(texts, tree)
    return sum(1 + len(path) for path in paths) / len(paths)


def random_texts(seed):
    rng = np.random.default_rng(seed)
    shapes = [(int(rng.integers(0, 30)), 3) for _ in range(5)] + [(7, 3)]
    return [rng.integers(-1, 3, shape) for shape in shapes]  # -1: no token


@given(st.integers(0, 10**6), st.sampled_from(TREES))
@settings(max_examples=60)
def test_visits_and_tau_are_those_of_walks_by_hand(seed, tree):
    texts = random_texts(seed)
    walks = Walks(texts, tree)
    paths = paths_by_hand(texts, tree)
    assert walks.tau() == pytest.approx(tau_by_hand(texts, tree))
    for node, visits in zip([(), *tree], walks.visits(), strict=True):
        assert visits == sum(path[: len(node)] == node for path in paths)
    assert len(walks.visited()) == len(paths)


def test_an_absent_token_is_a_miss_for_every_rank():
    texts = [np.array([[0, -1, -1]] * 6)]
    assert walk_taus(texts, walked_tree(texts, 9, 3), [1, 9]) == [2.0, 2.0]
    walks = Walks(texts)
    assert walks.tau_with([(0,)]) == [2.0]


texts_of_ranks = st.lists(
    st.lists(st.tuples(*[st.integers(0, RANKS)] * HEADS), max_size=20), min_size=1, max_size=5
).filter(any)


def arrays(texts):
    return [np.array(text, dtype=np.int64).reshape(-1, HEADS) for text in texts]


def grown(texts, size, max_rank):
    """The tree of ``size`` nodes, and tau of each of its prefixes."""
    paths = walked_tree(arrays(texts), size, max_rank)
    return paths, walk_taus(arrays(texts), paths, range(1, len(paths) + 1))


@given(texts_of_ranks, st.integers(1, 6))
@settings(max_examples=60)
def test_every_node_is_the_best_next_one(texts, size):
    """Each prefix has the tau of a manual walk, and no other candidate would give more."""
    paths, taus = grown(texts, size, RANKS)
    assert len(paths) == len(taus) == size
    TokenTree(tuple(paths))  # valid, parents first
    for count in range(size):
        tree = paths[: count + 1]
        assert taus[count] == pytest.approx(tau_by_hand(texts, tree))
        assert Walks(arrays(texts), tree).tau() == pytest.approx(taus[count])
        parents = [(), *paths[:count]]
        widths = {p: sum(q[:-1] == p for q in paths[:count]) for p in parents}
        rivals = [(*p, w) for p, w in widths.items() if len(p) < HEADS and w < RANKS]
        best = max(tau_by_hand(texts, [*paths[:count], rival]) for rival in rivals)
        assert taus[count] == pytest.approx(best)


def test_the_search_stops_when_the_heads_offer_no_more():
    paths, taus = grown([[(0, 0)] * 9], 50, 2)
    assert len(paths) == 2 + 4
    assert set(paths) == {(a,) for a in range(2)} | set(itertools.product(range(2), repeat=2))
    assert taus[-1] == 3.0


def test_the_shallower_of_equal_candidates_is_chosen():
    paths = walked_tree([np.full((5, 2), -1)], 4, 2)
    assert paths == [(0,), (1,), (0, 0), (0, 1)]


def test_empty_texts_are_refused():
    with pytest.raises(ValueError, match="longer texts"):
        walked_tree(arrays([[]]), 3, 2)
