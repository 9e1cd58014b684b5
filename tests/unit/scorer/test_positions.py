import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paged_trees import random_tree_batch

from vllm_medusa.scorer.positions import ragged_rows, write_node_positions

sizes_and_bases = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=5
)


def test_ragged_rows_are_the_documented_example():
    request, node = ragged_rows(torch.tensor([0, 3, 4], dtype=torch.int32), 4)
    assert request.tolist() == [0, 0, 0, 1]
    assert node.tolist() == [0, 1, 2, 0]


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
    write_node_positions(
        positions,
        torch.tensor(bases, dtype=torch.int32),
        tree.depths,
        tree.cu_num_nodes,
        total,
        torch.tensor(starts, dtype=torch.int32) if gap else None,
    )
    assert torch.equal(positions, expected)
