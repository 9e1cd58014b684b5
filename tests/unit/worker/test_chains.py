"""Root paths laid out as chains, against the paths themselves."""

from __future__ import annotations

import pytest

from vllm_medusa.tree import TokenTree
from vllm_medusa.worker.v2.chains import PathChains

TREES = [TokenTree.chain(1), TokenTree.chain(5), TokenTree.dense([3, 2, 2]),
         TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]])]  # fmt: skip


def root_path(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.num_nodes}_nodes")
def test_every_node_ends_a_chain_of_its_own(tree: TokenTree) -> None:
    chains = PathChains.of(tree)
    assert len(chains.last) == tree.num_nodes and len(chains.nodes) == len(chains.local)
    assert len(chains.nodes) == sum(depth + 1 for depth in tree.depths)
    for node, last in enumerate(chains.last.tolist()):
        depth = int(chains.local[last])
        rows = range(last - depth, last + 1)
        assert depth == tree.depths[node]
        assert [int(chains.nodes[row]) for row in rows] == root_path(tree, node)
        assert [int(chains.local[row]) for row in rows] == list(range(depth + 1))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.num_nodes}_nodes")
def test_a_cut_tree_has_the_first_chains(tree: TokenTree) -> None:
    whole = PathChains.of(tree)
    for num_nodes in range(1, tree.num_nodes + 1):
        rows = sum(depth + 1 for depth in tree.depths[:num_nodes])
        part = whole.prefix(rows, num_nodes)
        cut = PathChains.of(tree.prefix(num_nodes))
        for name in ("nodes", "local", "last"):
            assert getattr(part, name).equal(getattr(cut, name)), name
