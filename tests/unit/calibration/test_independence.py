import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.calibration.independence import independent_tau, independent_tree
from vllm_medusa.tree import TokenTree, load_preset, preset_names

TABLES = json.loads((Path(__file__).parent / "published_tables.json").read_text())


def naive_tree(table, num_nodes, depth):
    """The algorithm in words: look at every candidate of every node taken, keep the best."""
    taken = [(0,)]
    while len(taken) < num_nodes:
        best, best_chance = None, 0.0
        for node in taken:
            candidates = []
            if node[-1] + 1 < table.shape[1]:
                candidates.append((*node[:-1], node[-1] + 1))
            if len(node) < depth:
                candidates.append((*node, 0))
            for candidate in candidates:
                chance = np.float32(1)
                for head, rank in enumerate(candidate):
                    chance = np.float32(chance * table[head, rank])
                if candidate not in taken and chance > best_chance:
                    best, best_chance = candidate, chance
        if best is None:
            break
        taken.append(best)
    return taken


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=150)
def test_same_nodes_same_order_as_the_naive_search(seed, num_heads, num_ranks, size):
    """Few distinct values, so that ties are common; zeros, so that the search can end early."""
    rng = np.random.default_rng(seed)
    table = rng.choice([0, 0.1, 0.25, 0.5, 1], (num_heads, num_ranks)).astype(np.float32)
    depth = int(rng.integers(1, num_heads + 1))
    paths = independent_tree(table, size, depth)
    assert paths == naive_tree(table, size, depth)
    TokenTree(tuple(paths))  # valid, parents first


def test_with_falling_accuracies_no_tree_of_the_size_expects_more():
    """Brute force over all trees of 4 nodes: greedy is best when each head's ranks fall off."""
    table = np.array([[0.5, 0.29, 0.1], [0.6, 0.2, 0.1], [0.7, 0.1, 0.1]], np.float32)

    def grown(tree):
        for node in [(), *tree]:
            for rank in range(3):
                if len(node) < 3 and (*node, rank) not in tree:
                    yield tree | {(*node, rank)}

    trees = {frozenset()}
    for _ in range(4):
        trees = {bigger for tree in trees for bigger in grown(tree)}
    best = max(independent_tau(table, sorted(tree)) for tree in trees)
    paths = independent_tree(table, 4)
    assert independent_tau(table, paths) == pytest.approx(best)
    assert paths == [(0,), (0, 0), (1,), (0, 0, 0)]


@pytest.mark.parametrize("name", preset_names())
def test_every_published_tree_comes_back_from_accuracies(name):
    """Nodes and order. The tables that made the trees were not published: these are solutions, by
    linear programming, of the inequalities that a tree's order puts on the logarithms.
    """
    table = np.exp(np.array(TABLES[name]) / 1000).astype(np.float32)  # [5, 10]
    published = load_preset(name).paths
    paths = independent_tree(table, len(published))
    assert tuple(paths) == published


def test_of_equals_the_first_proposed_is_taken():
    paths = independent_tree(np.full((2, 3), 0.5, np.float32), 5)
    assert paths == [(0,), (1,), (2,), (0, 0), (1, 0)]


def test_the_first_node_is_taken_even_without_a_chance():
    assert independent_tree(np.zeros((2, 2)), 5) == [(0,)]


def test_the_estimate_by_hand():
    table = np.array([[0.5, 0.25], [0.5, 0.125]])
    assert independent_tau(table, [(0,), (1,), (0, 1)]) == 1 + 0.5 + 0.25 + 0.5 * 0.125
