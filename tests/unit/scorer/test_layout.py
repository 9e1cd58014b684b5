"""Layouts of CPU caches, and attention over MLA's latent one against the dense reference.

The packing itself is checked against vLLM in tests/integration/test_cpu_layout.py.
"""

from __future__ import annotations

import pytest
import torch
from support.attention import element_offsets, flat, gather_tokens
from support.in_torch import attention_reference

from vllm_medusa.kv import copy_slots
from vllm_medusa.scorer.latent import LatentPlan, latent_attention
from vllm_medusa.scorer.layout import SUPPORTED_ISAS, CacheLayout
from vllm_medusa.tree.batch import TreeBatch


@pytest.mark.parametrize("isa", SUPPORTED_ISAS)
def test_blocks_may_have_gaps(isa):
    cache = torch.arange(4.0 * 2 * 32 * 64).view(4, 2, 32, 64)
    apart = torch.full((4, 3 * 2 * 32 * 64), float("nan"))[:, : 2 * 32 * 64].view(4, 2, 32, 64)
    apart.copy_(cache)
    slots = torch.tensor([[0, 33], [127, 64]])
    for one, other in zip(
        gather_tokens(cache, isa, slots), gather_tokens(apart, isa, slots), strict=True
    ):
        assert one.shape == (2, 2, 2, 32)
        assert torch.equal(one, other)
    everything = torch.cat(gather_tokens(cache, isa, torch.arange(4 * 32)))
    assert torch.equal(everything.flatten().sort().values, cache.flatten())
    for each in (apart, cache):
        layout = CacheLayout.of(each, isa)
        copy_slots(flat(layout, each), *(element_offsets(layout, part) for part in slots))
    assert torch.equal(apart, cache)


def test_refusals_name_the_value_and_the_remedy():
    with pytest.raises(ValueError, match=r"'neon'.*vec, vec16, amx.*x86"):
        CacheLayout.of(torch.zeros(2, 2, 32, 64), "neon")
    with pytest.raises(ValueError, match=r"divisible by 32, not 16.*--block-size"):
        CacheLayout.of(torch.zeros(2, 2, 16, 64), "amx")
    with pytest.raises(ValueError, match=r"shape \(2, 16, 64\)"):
        CacheLayout.of(torch.zeros(2, 16, 64), "vec")
    with pytest.raises(ValueError, match="strides"):
        CacheLayout.of(torch.zeros(2, 16, 2, 64).transpose(1, 2), "vec")


RANK, WIDTH, HEADS, BLOCK = 24, 32, 3, 16
BASES, STARTS = [0, 5, 40], [2, 3, 9]  # context tokens, first query rows
PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4], [-1, 0, 0, 0, 3, 3]])
COUNTS = [1, 6, 5]  # nodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = torch.randn(20, BLOCK, WIDTH).to(dtype)
    query = torch.randn(16, HEADS, WIDTH).to(dtype)
    table = torch.randperm(20)[:12].view(3, 4)
    trees = TreeBatch.from_parents(PARENTS, torch.tensor(COUNTS), 3)
    seen = [trees.ancestors[b, :n, :n] for b, n in enumerate(COUNTS)]
    plan = LatentPlan.of(STARTS, BASES, seen, table, BLOCK)
    out = torch.full((16, HEADS, RANK), 7.0, dtype=dtype)
    latent_attention(query, cache, plan, RANK, 0.2, out)
    untouched = torch.ones(16, dtype=torch.bool)
    for b, (start, base, count) in enumerate(zip(STARTS, BASES, COUNTS, strict=True)):
        token = torch.arange(base + count)
        keys = cache[table[b, token // BLOCK], token % BLOCK].unsqueeze(1)
        mask = torch.cat([torch.ones(count, base, dtype=torch.bool), seen[b]], 1)
        rows = slice(start, start + count)
        expected = attention_reference(query[rows], keys, keys[..., :RANK], mask, 0.2)
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-2, rtol=1e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)
        untouched[rows] = False
    assert out[untouched].eq(7).all() and untouched.sum() == 4
