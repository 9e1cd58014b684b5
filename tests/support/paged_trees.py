"""The cases of `paged_batches` in the cache layout of vLLM's CPU attention: trees alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from support import paged_batches
from support.attention import element_offsets, flat
from support.random_trees import random_parents
from vllm_medusa.scorer.cpu import AttentionPlan, plan_trees, tree_attention
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.tree.batch import TreeBatch

UNTOUCHED = 7.0


def random_tree_batch(sizes: list[int], generator: torch.Generator, shape: str) -> TreeBatch:
    """Trees of ``sizes`` nodes of one of the shapes of `random_parents`."""
    parents = [random_parents(max(sizes), generator, shape) for _ in sizes]
    return _batch(torch.tensor(parents), sizes)


def _batch(parents: Tensor, sizes: list[int]) -> TreeBatch:
    tree = TreeBatch.from_parents(parents, torch.tensor(sizes), max(sizes) - 1)
    return replace(tree, max_depth=int(tree.depths.max()))


@dataclass(frozen=True)
class Case:
    paged: paged_batches.Case
    kv_cache: Tensor
    tree: TreeBatch
    base: Tensor  # int64 [B]
    block_table: Tensor
    starts: Tensor  # int64 [B], query row of each root
    meta: AttentionPlan

    @property
    def query(self) -> Tensor:
        return self.paged.query

    @property
    def scale(self) -> float:
        return self.paged.scale

    def error(self, softcap: float = 0.0, sinks: Tensor | None = None) -> float:
        """Largest difference to the reference; rows between the trees must stay as they were."""
        out = torch.full_like(self.query, UNTOUCHED)
        found = tree_attention(
            self.query, self.kv_cache, self.meta, self.scale, softcap, sinks, out
        )
        assert found is out
        options = self.paged.options | {"softcap": softcap, "sinks": sinks}
        expected = replace(self.paged, options=options).expected()
        of_trees = [r.is_tree for r in self.paged.requests for _ in range(r.rows)]
        expected[~torch.tensor(of_trees)] = UNTOUCHED
        assert expected.isfinite().all()
        return (out.double() - expected).abs().max().item()  # NaN fails every comparison


def make_case(
    sizes: list[int],
    bases: list[int],
    *,
    shape: str = "random",
    isa: str = "vec16",
    gap: int = 0,
    **options: Any,
) -> Case:
    """Trees of ``sizes`` nodes behind ``bases`` tokens, each behind ``gap`` rows of a prefill."""
    requests = []
    for size, base in zip(sizes, bases, strict=True):
        requests += [paged_batches.chunk(gap)] * (gap > 0)
        requests.append(paged_batches.tree(size, base, shape))
    paged = paged_batches.make_case(requests, **{"dim": 32} | options)
    blocks, block, heads, dim = paged.key_cache.shape
    kv_cache = torch.full((blocks, heads, block, 2 * dim), torch.nan, dtype=paged.query.dtype)
    layout = CacheLayout.of(kv_cache, isa)
    tokens = torch.stack((paged.key_cache, paged.value_cache), 3).flatten(0, 1)
    flat(layout, kv_cache)[element_offsets(layout, torch.arange(blocks * block))] = tokens
    chosen = torch.tensor([request.is_tree for request in requests])
    tree, base = _batch(paged.parents[chosen], sizes), torch.tensor(bases)
    starts = paged.batch.cu_query_lens[:-1][chosen].long()
    table, rows = paged.batch.block_table[chosen], paged.query.shape[1]
    window = paged.options["window"]
    meta = plan_trees(tree, base, table, layout, rows, window, starts if gap else None)
    return Case(paged, kv_cache, tree, base, table, starts, meta)
