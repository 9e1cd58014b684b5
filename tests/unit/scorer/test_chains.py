"""Root paths laid out as chains, compared with the paths themselves."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.scorer.chains import first_rows, height, lay_out
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

BUSHY = TokenTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]])


def root_path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def check(tree: TreeBatch, counts: list[int], by_path: list[bool]) -> None:
    """Every node's row, and the rows before it, are those of its path."""
    num_nodes, chained = np.array(counts), np.array(by_path)
    first = first_rows(chained, num_nodes, height(tree))
    layout = lay_out(tree, torch.from_numpy(chained), torch.from_numpy(first), int(first[-1]))
    assert len(layout.rows) == len(layout.local) == first[-1]
    assert layout.index.shape == (len(counts), num_nodes.max())
    logits_row = 0  # row of the request's root
    for b, count in enumerate(counts):
        assert first[b + 1] - first[b] == count * (height(tree) if chained[b] else 1)
        for node in range(layout.index.shape[1]):
            real = min(node, count - 1)
            row = int(layout.index[b, node])
            assert first[b] <= row < first[b + 1]
            assert layout.rows[row] == logits_row + real
            if chained[b]:
                history = layout.rows[row - int(layout.local[row]) : row + 1] - logits_row
                assert history.tolist() == root_path(tree.parents[b].tolist(), real)
        logits_row += count
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(np.diff(first)))
    row = torch.arange(len(owner))
    assert torch.equal(owner[row - layout.local.long()], owner)  # histories are separate


# Per request: number of nodes, and whether it needs chains.
requests = st.lists(
    st.tuples(st.integers(1, BUSHY.num_nodes), st.booleans()), min_size=1, max_size=6
)


@given(requests)
def test_one_tree_for_all(shape):
    counts, by_path = map(list, zip(*shape, strict=True))
    tensors = TreeTensors.from_tree(BUSHY)
    check(tensors.batch(max(counts), torch.tensor(counts)), counts, by_path)


@given(requests, st.randoms(use_true_random=False))
def test_a_tree_per_request(shape, rng):
    counts, by_path = map(list, zip(*shape, strict=True))
    parents = []
    for _ in counts:
        order, open_nodes = [0], [1, 2]
        while open_nodes:
            order.append(open_nodes.pop(rng.randrange(len(open_nodes))))
            open_nodes += [n for n, p in enumerate(BUSHY.parents) if p == order[-1] and n]
        order = order[: max(counts)]
        parents.append([-1, *(order.index(BUSHY.parents[node]) for node in order[1:])])
    num_nodes = torch.tensor(counts)
    tree = TreeBatch.from_parents(torch.tensor(parents), num_nodes, BUSHY.max_depth)
    check(tree, counts, by_path)
