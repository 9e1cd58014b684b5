"""One level of a drafter's trees: the rows of its nodes are those of the whole tree."""

import pytest
import torch
from support.paged_trees import make_case

from vllm_medusa.scorer.branches import build_branches
from vllm_medusa.scorer.cpu import tree_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bases", [[40], [40, 41, 40], [200, 3, 64]])
def test_rows_of_the_newest_level(bases: list[int], dtype: torch.dtype) -> None:
    size, queries = 11, 4
    case = make_case([size] * len(bases), bases, dtype=dtype)
    whole = tree_attention(case.query, case.kv_cache, case.meta, case.scale)
    newest = whole.unflatten(0, (-1, size))[:, -queries:].flatten(0, 1)
    query = case.query.unflatten(0, (-1, size))[:, -queries:].flatten(0, 1)
    seen = case.meta.tree.ancestors[:, -queries:]

    def attend(seen: torch.Tensor) -> torch.Tensor:
        meta = case.meta
        plan = build_branches(seen, meta.base, meta.block_table, meta.layout, 4)
        return tree_attention(query, case.kv_cache, plan, case.scale)

    torch.testing.assert_close(attend(seen), newest)
    others = seen.clone()
    others[:, -1, 1:-1] ^= True  # a node sees those it must not, and not its own ancestors
    wrong = (attend(others).float() - newest.float()).abs().amax((1, 2))
    assert (wrong.view(-1, queries) > 0.01).tolist() == [[False] * 3 + [True]] * len(bases)
