"""Root paths laid out as chains, against the paths themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.scorer.chains import PathChains
from vllm_medusa.tree import TokenTree

BUSHY = TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]])
TREES = [TokenTree.chain(1), TokenTree.chain(5), TokenTree.dense([3, 2, 2]), BUSHY]


def root_path(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    return path


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.num_nodes}_nodes")
def test_every_node_ends_a_chain_of_its_own(tree):
    chains = PathChains.of(tree)
    assert len(chains.last) == tree.num_nodes and len(chains.nodes) == len(chains.local)
    assert len(chains.nodes) == sum(depth + 1 for depth in tree.depths)
    for node, last in enumerate(chains.last.tolist()):
        rows = range(last - tree.depths[node], last + 1)
        assert [int(chains.nodes[row]) for row in rows] == root_path(tree, node)
        assert [int(chains.local[row]) for row in rows] == list(range(len(rows)))


# Per request: the nodes it verifies, and whether it needs chains.
requests = st.lists(
    st.tuples(st.integers(1, BUSHY.num_nodes), st.booleans()), min_size=1, max_size=6
)


@given(requests)
@settings(deadline=None)
def test_rows_of_a_batch(shape):
    num_nodes, by_path = (np.array(column) for column in zip(*shape, strict=True))
    layout = PathChains.of(BUSHY).lay_out(by_path, num_nodes)
    assert len(layout.rows) == len(layout.local) == layout.first[-1]
    assert layout.index.shape == (len(shape), num_nodes.max())
    logits_row = 0  # of the request's root
    for b, (count, chained) in enumerate(shape):
        for node in range(layout.index.shape[1]):
            real = min(node, count - 1)
            row = int(layout.index[b, node])
            assert layout.first[b] <= row < layout.first[b + 1]
            assert layout.rows[row] == logits_row + real
            if chained:
                history = layout.rows[row - layout.local[row] : row + 1] - logits_row
                assert history.tolist() == root_path(BUSHY, real)
        if not chained:
            assert layout.first[b + 1] - layout.first[b] == count
        logits_row += count
