"""One level of a drafter's trees: the rows of its nodes equal those of the whole tree."""

from dataclasses import replace

import pytest
import torch
from support.in_torch import paged_tree_attention_torch, unpack_ancestors
from support.paged_batches import make_case as make_paged
from support.paged_batches import tree
from support.paged_trees import make_case

from vllm_medusa.scorer.cpu import plan_branches, tree_attention
from vllm_medusa.scorer.paged import TreeBuffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bases", [[40], [40, 41, 40], [200, 3, 64]])
@pytest.mark.parametrize("window", [None, 30])
def test_rows_of_the_newest_level(bases: list[int], dtype: torch.dtype, window: int | None) -> None:
    size, queries = 11, 4
    case = make_case([size] * len(bases), bases, dtype=dtype, window=window)
    depths = case.tree.depths.to(torch.int64)
    whole = tree_attention(case.query, case.kv_cache, case.meta, case.scale)
    newest = whole.unflatten(0, (-1, size))[:, -queries:].flatten(0, 1)
    query = case.query.unflatten(0, (-1, size))[:, -queries:].flatten(0, 1)
    seen = case.tree.ancestors[:, -queries:]

    def attend(seen: torch.Tensor) -> torch.Tensor:
        plan = plan_branches(seen, case.base, case.block_table, case.meta.layout, 4, window, depths)
        return tree_attention(query, case.kv_cache, plan, case.scale)

    torch.testing.assert_close(attend(seen), newest)
    others = seen.clone()
    others[:, -1, 1:-1] ^= True  # a node sees forbidden nodes instead of its ancestors
    wrong = (attend(others).float() - newest.float()).abs().amax((1, 2))
    assert (wrong.view(-1, queries) > 0.01).tolist() == [[False] * 3 + [True]] * len(bases)


@pytest.mark.parametrize("window", [None, 12])
def test_levels_in_paged_attention(window: int | None) -> None:
    """Each of three levels equals the whole tree's rows; its bits stay in the same memory."""
    size, queries, requests = 66, 22, 2
    case = make_paged([tree(size, 40), tree(size, 3)], heads=(2, 1), window=window)
    seen = unpack_ancestors(case.batch.ancestor_bits, size)
    expected = case.expected().unflatten(0, (requests, size))
    query = case.query.unflatten(0, (requests, size))
    branches, places = TreeBuffers.allocate(3, size + 6, "cpu", is_tree=True), set()
    cu = torch.arange(0, 3 * queries, queries, dtype=torch.int32)
    for end in range(queries, size + 1, queries):
        rows = slice(end - queries, end)
        lengths = (case.batch.seq_lens - size + end).int()
        depths = case.batch.depths[:, :end]
        before = branches.write_level(seen[:, rows, :end], depths)
        where = cu, lengths, case.batch.block_table, queries
        batch = branches.batch(*where, rows_before=before)
        level = replace(case, query=query[:, rows].flatten(0, 1), batch=batch)
        out = level.run(paged_tree_attention_torch, torch.float64)
        torch.testing.assert_close(out.unflatten(0, (requests, queries)), expected[:, rows])
        places.add((batch.ancestor_bits.data_ptr(), batch.depths.data_ptr()))
        if end > queries:
            wrong = level.with_batch(rows_before=0)
            out = wrong.run(paged_tree_attention_torch, torch.float64)
            assert not torch.allclose(out.unflatten(0, (requests, queries)), expected[:, rows])
    assert len(places) == 1
