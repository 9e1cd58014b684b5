"""Random batches of trees, chunks and decodes over a paged cache that is NaN wherever possible.

NaN: slots that no row may see, whole blocks after the last used one or before the
window, the output and the workspace. Garbage: ancestor bits and depths of padding nodes and of
requests that are not trees.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from support.attention import visible_keys
from support.in_torch import attention_reference, paged_tree_attention_torch
from support.random_trees import random_parents
from vllm_medusa.scorer.paged import FP8_DTYPES, PagedBatch, SplitWorkspace
from vllm_medusa.tree.ancestors import dense_ancestors, num_words, pack_ancestors

NAN = float("nan")


@dataclass(frozen=True)
class Request:
    """``rows`` query rows after ``context`` tokens."""

    rows: int
    context: int = 0
    is_tree: bool = False
    shape: str = "random"  # of the tree; or "chain", "star", "pairs" (a complete binary tree)


def tree(rows: int, context: int = 0, shape: str = "random") -> Request:
    return Request(rows, context, True, shape)


def chunk(rows: int, context: int = 0) -> Request:
    return Request(rows, context)


def decode(context: int) -> Request:
    return Request(1, context)


PADDING = Request(0)


@dataclass(frozen=True)
class Case:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    scale: float
    options: dict[str, Any]
    parents: Tensor  # int64 [B, N]
    requests: tuple[Request, ...]
    slots: tuple[Tensor, ...] = field(default=())  # int64 [context + rows] of each request

    @property
    def num_rows(self) -> int:
        return sum(r.rows for r in self.requests)

    def run(self, attention=None, dtype: torch.dtype | None = None, **changes):
        """The output, by default of the kernel; NaN before the call."""
        if attention is None:
            from vllm_medusa.scorer.launch import paged_tree_attention as attention
        out = torch.full_like(self.query, NAN, dtype=dtype or self.query.dtype)
        space = self.batch.workspace
        if space is not None:
            space.values.fill_(NAN)
            space.lse.fill_(NAN)
        caches = (self.key_cache, self.value_cache)
        options = {**self.options, "scale": self.scale, "batch": self.batch, **changes}
        result = attention(self.query, *caches, out=out, **options)
        assert result is out
        return out

    def expected(self) -> Tensor:
        """The output in fp64 by the reference, from parents and slots: nothing of ``batch``."""
        out = torch.full_like(self.query, NAN, dtype=torch.float64)
        row, options = 0, self.options
        for b, request in enumerate(self.requests):
            if request.rows == 0:
                continue
            rows = slice(row, row := row + request.rows)
            parents = range(-1, request.rows - 1)
            if request.is_tree:
                parents = self.parents[b, : request.rows].tolist()
            keys, values = (
                self.tokens(b, cache, scale)
                for cache, scale in (
                    (self.key_cache, options["k_scale"]),
                    (self.value_cache, options["v_scale"]),
                )
            )
            seen = visible_keys(request.context, parents, options["window"]).to(keys.device)
            out[rows] = attention_reference(
                self.query[rows],
                keys,
                values,
                seen,
                self.scale,
                options["softcap"],
                options["sinks"],
            )
        return out

    def tokens(self, b: int, cache: Tensor, scale: Tensor | None) -> Tensor:
        """A request's tokens in ``cache``, in order: fp64 [context + rows, Hkv, D]."""
        size, slots = cache.shape[1], self.slots[b].to(cache.device)
        raw = cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache
        found = raw[slots // size, slots % size].view(cache.dtype).double()
        return found if scale is None else found * scale.double()

    def difference(self, out: Tensor) -> float:
        """Largest difference of an output to the reference.

        Rows outside all requests must be unchanged.
        """
        return self._difference(out, self.expected())

    def difference_to_torch(self, out: Tensor) -> float:
        """Differences from the torch twin, which reads ``batch``; for batches that never occur."""
        return self._difference(out, self.run(paged_tree_attention_torch, torch.float64))

    def _difference(self, out: Tensor, expected: Tensor) -> float:
        rows = self.num_rows
        assert expected[:rows].isfinite().all()
        assert out[rows:].isnan().all()
        difference = out[:rows].double() - expected[:rows]
        return difference.abs().amax().item() if difference.numel() else 0.0

    def with_batch(self, **changes: Any) -> Case:
        return replace(self, batch=replace(self.batch, **changes))


def make_case(
    requests: list[Request],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    splits: int = 1,
    nodes: int | None = None,
    slack: int = 0,
    spare_rows: int = 0,
    layout: str = "heads first",
    static: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """``nodes`` pads the trees, ``slack`` loosens the bound of query lengths.

    ``layout`` is the memory layout of a cache block; with ``static`` all requests share one tree,
    expanded.
    """
    generator = torch.Generator().manual_seed(seed)
    count, kv_dtype = len(requests), kv_dtype or dtype
    longest = max(r.rows for r in requests)
    nodes = nodes or max([r.rows for r in requests if r.is_tree], default=1)
    shapes = [requests[0].shape] if static else [r.shape for r in requests]
    parents = torch.tensor([random_parents(nodes, generator, s) for s in shapes])
    ancestors = dense_ancestors(parents)
    depths, bits = ancestors.sum(-1, dtype=torch.int32) - 1, pack_ancestors(ancestors)
    if static:
        parents, depths = parents.expand(count, -1), depths.to(device).expand(count, -1)
        bits = bits.to(device).expand(count, -1, -1)
    else:
        for b, request in enumerate(requests):
            kept = request.rows if request.is_tree else 0
            garbage = torch.randint(-(2**62), 2**62, (nodes, num_words(nodes)), generator=generator)
            bits[b, kept:] = garbage[kept:]
            depths[b, kept:] = torch.randint(0, 99, (nodes - kept,), generator=generator).int()

    def visible_from(request: Request) -> int:
        return 0 if window is None else max(0, request.context - window + 1)

    needed = [-(-(r.context + r.rows) // block) for r in requests]
    ids = torch.randperm(sum(needed), generator=generator) + 1
    poisoned = sum(needed) + 1  # blocks 0 and the last only hold NaN
    table = torch.full((count, max(needed) + 2), poisoned, dtype=torch.int32)
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([1.75])
    if kv_dtype not in FP8_DTYPES:
        k_scale = v_scale = None
    shape = (poisoned + 1, heads[1], block, 2 * dim)  # [num_blocks, Hkv, block_size, 2 * D]
    cache = torch.full(shape, NAN)
    slots, used = [], 0
    for b, request in enumerate(requests):
        table[b, : needed[b]] = ids[used : used + needed[b]]
        used += needed[b]
        left = visible_from(request)
        index = torch.arange(request.context + request.rows)
        slots.append(table[b, index // block].long() * block + index % block)
        table[b, : left // block] = 0
        own = slots[-1][left:]
        cache[own // block, :, own % block] = torch.randn(
            len(own), heads[1], 2 * dim, generator=generator
        )
    cache = cache.to(kv_dtype)
    if layout == "tokens first":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    key_cache, value_cache = cache.to(device).transpose(1, 2).split(dim, -1)
    if layout == "channels first":  # not a vLLM layout: any strides must work
        key_cache = key_cache.transpose(1, 3).contiguous().transpose(1, 3)

    sink_values = torch.linspace(-2, 3, heads[0])
    if heads[0] > 2:
        sink_values[0], sink_values[-1] = -120, 120  # whose exponentials overflow fp32
    total = sum(r.rows for r in requests)
    cu = torch.tensor([sum(r.rows for r in requests[:b]) for b in range(count + 1)])
    lens = torch.tensor([r.context + r.rows for r in requests])
    packed = torch.randn(total + spare_rows, heads[0] + 3, dim, generator=generator)
    capacity = (total + spare_rows) * heads[0] * splits
    batch = PagedBatch(
        cu_query_lens=cu.int().to(device),
        seq_lens=lens.int().to(device),
        block_table=table.to(device),
        is_tree=torch.tensor([r.is_tree for r in requests], device=device),
        ancestor_bits=bits.to(device),
        depths=depths.to(device),
        max_query_len=longest + slack,
        num_splits=splits,
        workspace=SplitWorkspace.allocate(capacity, dim, device) if splits > 1 else None,
    )
    options = {
        "softcap": softcap,
        "window": window,
        "sinks": sink_values.to(device, dtype) if sinks else None,
        "k_scale": None if k_scale is None else k_scale.to(device),
        "v_scale": None if v_scale is None else v_scale.to(device),
    }
    return Case(
        query=packed.to(device, dtype)[:, 1 : heads[0] + 1],
        key_cache=key_cache,
        value_cache=value_cache,
        batch=batch,
        scale=dim**-0.5 * 1.3,
        options=options,
        parents=parents,
        requests=tuple(requests),
        slots=tuple(slots),
    )
