"""Shape of draft trees: what is accepted, what is refused, and the messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.tree.topology import MAX_NODES, TokenTree, TreeError


@st.composite
def trees(draw: st.DrawFn, max_drafts: int = 40) -> TokenTree:
    """Grow a random tree: each node is added below any earlier node, with any unused rank."""
    paths = [()]
    for _ in range(draw(st.integers(1, max_drafts))):
        child = (*draw(st.sampled_from(paths)), draw(st.integers(0, 5)))
        if child not in paths:
            paths.append(child)
    return TokenTree.from_paths(paths[1:])


def test_small_tree_by_hand():
    tree = TokenTree.from_paths([[0], [1], [0, 2], [0, 2, 0], [1, 1]])
    assert tree.paths == ((0,), (1,), (0, 2), (0, 2, 0), (1, 1))
    assert (tree.num_nodes, tree.num_draft_tokens, tree.max_depth) == (6, 5, 3)
    assert tree.parents == (-1, 0, 0, 1, 3, 2)
    assert tree.depths == (0, 1, 1, 2, 3, 2)
    assert tree.ranks == (0, 0, 1, 2, 0, 1)
    assert tree.head_widths == (2, 3, 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_dense_has_every_combination_in_order(widths):
    expected, level = 1, 1
    for width in widths:
        level *= width
        expected += level
    if expected > MAX_NODES:
        with pytest.raises(TreeError, match="more than 256 nodes"):
            TokenTree.dense(widths)
        return
    tree = TokenTree.dense(widths)
    assert tree.num_nodes == expected
    assert tree.head_widths == tuple(widths)
    keys = [(sum(path), len(path), path) for path in tree.paths]
    assert keys == sorted(keys)


@given(trees())
def test_parents_and_depths_agree_with_the_paths(tree):
    full = ((), *tree.paths)
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert full[node] == (*full[parent], tree.ranks[node])
        assert tree.depths[node] == tree.depths[parent] + 1
    assert max(tree.depths) == tree.max_depth == len(tree.head_widths)


@given(trees(), st.data())
def test_every_prefix_is_a_tree(tree, data):
    size = data.draw(st.integers(1, tree.num_nodes + 3))
    prefix = tree.prefix(size)
    kept = min(size, tree.num_nodes)
    assert prefix.num_nodes == kept
    assert prefix.paths == tree.paths[: kept - 1]
    assert prefix.parents == tree.parents[:kept]


@given(trees(), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_nodes_parents_first(tree, random):
    shuffled = list(tree.paths)
    random.shuffle(shuffled)
    reordered = TokenTree.from_paths(shuffled)  # the constructor refuses children first
    assert set(reordered.paths) == set(tree.paths)
    assert TokenTree.from_paths(reordered.paths) == reordered


def test_truncation_keeps_what_fits():
    tree = TokenTree.dense([3, 2])
    assert tree.cut(max_depth=1).paths == ((0,), (1,), (2,))
    assert tree.cut(num_ranks=1).paths == ((0,), (0, 0))
    assert tree.cut() == tree


def test_numpy_integers_are_accepted():
    tree = TokenTree.from_paths([np.array([0]), (np.int64(0), np.int32(1))])
    assert tree.paths == ((0,), (0, 1))
    assert all(type(rank) is int for path in tree.paths for rank in path)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "no path"),
        ([[0], []], "Path 1 of the tree is empty; the root is implicit"),
        ([[0], [0]], r"Path \[0\] is listed twice"),
        ([[0, 0], [0], [0, 0]], r"Path \[0, 0\] is listed twice"),
        ([[0], [1, 2]], r"Path \[1, 2\] is an orphan: its parent \[1\] is not in the tree. Add"),
        ([[0], [-1]], r"Path \[-1\] has the negative rank -1; ranks count from 0"),
        ([[0], 1], "Path 1 of the tree is 1; a path is a list of ranks"),
        ([[0], "0"], "Path 1 of the tree is '0'"),
        ([[0], [0, 0.5]], "a non-integer"),
        ([[0], [True]], "a non-integer"),
        ([["0"]], "a non-integer"),
        ("[[0]]", "A tree is a list of paths"),
        (7, "A tree is a list of paths"),
        ([[rank] for rank in range(256)], "257 nodes, root included; at most 256"),
    ],
)
def test_invalid_lists_are_refused(paths, words):
    with pytest.raises(TreeError, match=words):
        TokenTree.from_paths(paths)


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ([], "without widths"),
        ([2, 0], "Width 1 of the dense tree is 0"),
        ([True], "Width 0 of the dense tree is True"),
        ([2.0], "Width 0 of the dense tree is 2.0"),
        ("43", "widths of a dense tree are '43'"),
        (4, "widths of a dense tree are 4"),
        ([256], "more than 256 nodes"),
        ([10**9] * 50, "more than 256 nodes"),  # refused before any path is built
    ],
)
def test_bad_widths(widths, words):
    with pytest.raises(TreeError, match=words):
        TokenTree.dense(widths)


@pytest.mark.parametrize("depth", [0, -1, 256, True, "4", None])
def test_bad_chain(depth):
    with pytest.raises(TreeError, match="an integer from 1 to 255"):
        TokenTree.chain(depth)


def test_the_largest_trees():
    assert TokenTree.chain(255).num_nodes == MAX_NODES
    assert TokenTree.dense([255]).num_nodes == MAX_NODES


def test_children_first_are_refused():
    with pytest.raises(TreeError, match=r"\[0, 0\] comes before its parent \[0\]"):
        TokenTree(((0, 0), (0,)))
