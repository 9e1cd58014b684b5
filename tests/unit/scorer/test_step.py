"""The layout of a step against the same layout written as loops."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors

TREE = TokenTree.dense([3, 2])  # 10 nodes

# Per request: scheduled tokens before its first node (prefill), nodes to verify.
requests = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, TREE.num_nodes)), min_size=1, max_size=6
)


def build(shape: list[tuple[int, int]]) -> tuple[TreeStep, list[list[int]], torch.Tensor]:
    """The step, each request's node rows, and the scheduled token ids."""
    rows_of, row = [], 0
    for before, nodes in shape:
        row += before
        rows_of.append(list(range(row, row + nodes)))
        row += nodes
    ids = torch.randint(-1, 50, (row,), generator=torch.Generator().manual_seed(row))
    sizes = np.array([nodes for _, nodes in shape], dtype=np.int64)
    step = TreeStep.build(
        TreeTensors.from_tree(TREE).batch,
        sizes,
        torch.from_numpy(np.concatenate(([0], sizes.cumsum()))),
        torch.tensor([r for rows in rows_of for r in rows], dtype=torch.int32),
        ids.to(torch.int32),
    )
    return step, rows_of, ids


@given(requests)
def test_every_node_has_its_row(shape):
    step, rows_of, ids = build(shape)
    assert step.batch_size == len(shape)
    assert step.tree.max_nodes == max(nodes for _, nodes in shape)
    assert step.root_rows.tolist() == [rows[0] for rows in rows_of]
    for b, rows in enumerate(rows_of):
        for node in range(step.tree.max_nodes):
            row = rows[min(node, len(rows) - 1)]  # padding repeats the last node
            assert step.rows[step.row_of_node[b, node]] == row
            assert step.token_ids[b, node] == ids[row]
        assert step.cu_nodes[b + 1] - step.cu_nodes[b] == len(rows) == step.tree.num_nodes[b]


@given(requests)
def test_slots_are_those_of_the_rows(shape):
    step, rows_of, ids = build(shape)
    mapping = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1)) + 1000
    step.slot_mappings = {0: mapping, 1: mapping + 5000}
    for group in (0, 1):
        slots = step.slots(group)
        for b, rows in enumerate(rows_of):
            assert slots[b, : len(rows)].tolist() == step.slot_mappings[group][rows].tolist()


def test_dtypes():
    step, _, _ = build([(2, 4), (0, 1)])
    for tensor in (step.cu_nodes, step.rows, step.row_of_node, step.token_ids):
        assert tensor.dtype == torch.int64
