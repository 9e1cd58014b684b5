"""The layout of a step, and nodes' positions, against the same written as loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paged_trees import random_tree_batch

from vllm_medusa.scorer.cpu import topologies, write_positions
from vllm_medusa.scorer.step import TreeStep, write_node_positions
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

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


@pytest.mark.parametrize("sizes", [[1], [2, 1], [8, 3, 8], [70, 130, 1]])
def test_topologies_on_the_host_are_those_in_torch(sizes):
    tree = random_tree_batch(sizes, torch.Generator().manual_seed(len(sizes)), "random")
    counts = torch.tensor(sizes)
    expected = TreeBatch.from_parents(tree.parents, counts, max(sizes))
    found = topologies(tree.parents.contiguous(), counts)
    for name in ("num_nodes", "parents", "depths", "ancestor_bits", "ancestors"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.max_depth == int((expected.depths * expected.valid).max())


sizes_and_bases = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=5
)


@given(sizes_and_bases, st.integers(0, 3), st.booleans())
def test_written_rows_equal_a_loop_and_others_are_unchanged(cases, gap, wide):
    sizes, bases = [n for n, _ in cases], [c for _, c in cases]
    tree = random_tree_batch(sizes, torch.Generator().manual_seed(len(cases)), "random")
    total = sum(sizes)
    dtype = torch.int64 if wide else torch.int32
    positions = torch.full((total + gap * len(sizes) + 2,), -7, dtype=dtype)
    expected = positions.clone()
    starts = [sum(sizes[:b]) + gap * (b + 1) for b in range(len(sizes))]
    for b, start in enumerate(starts):
        for i in range(sizes[b]):
            expected[start + i] = bases[b] + int(tree.depths[b, i])
    step = TreeStep.build(
        lambda width, counts: tree,
        np.array(sizes),
        tree.cu_num_nodes,
        torch.tensor([start + i for start, n in zip(starts, sizes, strict=True) for i in range(n)]),
        torch.zeros_like(positions),
    )
    write_node_positions(positions, torch.tensor(bases, dtype=torch.int32), step)
    assert torch.equal(positions, expected)
    if wide:
        positions = torch.where(expected == -7, expected, 0)
        write_positions(positions, torch.tensor(bases), tree, torch.tensor(starts))
        assert torch.equal(positions, expected)
