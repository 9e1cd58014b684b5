"""Attention problems: random mixed batches over a poisoned cache, and uniform batches to time.

Poisoned: cache slots that no row sees, blocks of no request, the output, the LSE and the workspace
are NaN; block table entries out of use, masks and depths of padding nodes are garbage.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.scorer.paged import (
    FP8_DTYPES,
    PagedBatch,
    SplitWorkspace,
    paged_tree_attention_reference,
)
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.packing import dense_ancestors, num_words, pack_ancestors

NAN = float("nan")
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Request:
    """``rows`` query rows behind ``context`` tokens."""

    rows: int
    context: int = 0
    is_tree: bool = False


@dataclass(frozen=True)
class Shape:
    """Everything about a random problem but its values."""

    requests: tuple[Request, ...]
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: like dtype
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    splits: int = 1
    spare_rows: int = 0  # rows of no request behind the last one
    slack: int = 0  # how loose the bound of query lengths is
    table_width: int | None = None  # with `num_blocks`: problems of equal sizes,
    num_blocks: int | None = None  # whatever their contexts

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return sum(request.rows for request in self.requests)


@dataclass(frozen=True)
class Problem:
    """The arguments of one call."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    scale: float
    options: dict[str, Any]
    rows: int  # of requests; those behind stay NaN

    def outputs(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """An output and an LSE, all NaN."""
        out = torch.full_like(self.query, NAN, dtype=dtype or self.query.dtype)
        return out, torch.full_like(out[..., 0], NAN, dtype=dtype or torch.float32)

    def call(self, attention: Attention, out: Tensor, lse: Tensor) -> None:
        """Attend; in parts over a poisoned workspace."""
        if self.batch.workspace is not None:
            self.batch.workspace.values.fill_(NAN)
            self.batch.workspace.lse.fill_(NAN)
        caches = (self.key_cache, self.value_cache)
        attention(self.query, *caches, self.batch, self.scale, out=out, lse=lse, **self.options)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The reference's output and LSE in fp64."""
        out, lse = self.outputs(torch.float64)
        self.call(paged_tree_attention_reference, out, lse)
        return out, lse

    def buffers(self) -> list[Tensor]:
        """What another problem of the same sizes may be copied into, between graph replays."""
        batch = self.batch
        lengths = [batch.cu_query_lens, batch.seq_lens, batch.block_table]
        trees = [batch.is_tree, batch.ancestor_bits, batch.depths]
        return [self.query, self.key_cache, self.value_cache, *lengths, *trees]

    def without_self(self, request: int, row: int) -> Problem:
        """The same, but node ``row`` of the tree of ``request`` doesn't see itself."""
        bits = self.batch.ancestor_bits.clone()
        only = torch.zeros(row + 1, row + 1, dtype=torch.bool, device=bits.device)
        only[row, row] = True
        flip = pack_ancestors(only)[row]  # [words up to the row's]
        bits[request, row, : len(flip)] ^= flip
        return replace(self, batch=replace(self.batch, ancestor_bits=bits))


def random_problem(shape: Shape, seed: int, device: str) -> Problem:
    """Values, trees and block tables from ``seed``, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    requests, size, dim = shape.requests, shape.block_size, shape.head_size
    nodes = max([r.rows for r in requests if r.is_tree], default=1)
    depths, bits = _random_trees(requests, nodes, generator)
    needed = [-(-(r.context + r.rows) // size) for r in requests]
    num_blocks = shape.num_blocks or sum(needed) + 2
    ids = (torch.randperm(num_blocks - 2, generator=generator) + 1).tolist()
    width = shape.table_width or max(needed) + 2
    table = torch.full((len(requests), width), num_blocks - 1, dtype=torch.int32)
    cache = torch.full((num_blocks, shape.kv_heads, size, 2 * dim), NAN)
    for b, request in enumerate(requests):
        own, ids = ids[: needed[b]], ids[needed[b] :]
        table[b, : needed[b]] = torch.tensor(own, dtype=torch.int32)
        left = 0 if shape.window is None else max(0, request.context - shape.window + 1)
        seen = torch.arange(left, request.context + request.rows)
        values = torch.randn(len(seen), shape.kv_heads, 2 * dim, generator=generator)
        cache[table[b, seen // size].long(), :, seen % size] = values
        table[b, : left // size] = 0  # a block of NaN
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.rows)
    packed = torch.randn(
        shape.rows + shape.spare_rows, shape.heads + 3, dim, generator=generator
    )  # queries as they lie between keys and values in a packed projection
    key_cache, value_cache = (
        cache.to(shape.kv_dtype or shape.dtype).to(device).transpose(1, 2).split(dim, -1)
    )
    capacity = (shape.rows + shape.spare_rows) * shape.heads * shape.splits
    batch = PagedBatch(
        cu_query_lens=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(
            [r.context + r.rows for r in requests], dtype=torch.int32, device=device
        ),
        block_table=table.to(device),
        is_tree=torch.tensor([r.is_tree for r in requests], device=device),
        ancestor_bits=bits.to(device),
        depths=depths.to(device),
        max_query_len=max(r.rows for r in requests) + shape.slack,
        num_splits=shape.splits,
        workspace=SplitWorkspace.allocate(capacity, dim, device) if shape.splits > 1 else None,
    )
    quantised = shape.kv_dtype in FP8_DTYPES
    sinks = torch.linspace(-2, 3, shape.heads).to(device, shape.dtype)
    options = {
        "softcap": shape.softcap,
        "window": shape.window,
        "sinks": sinks if shape.sinks else None,
        "k_scale": torch.tensor([0.5], device=device) if quantised else None,
        "v_scale": torch.tensor([1.75], device=device) if quantised else None,
    }
    query = packed.to(device, shape.dtype)[:, 1 : shape.heads + 1]
    return Problem(query, key_cache, value_cache, batch, dim**-0.5 * 1.3, options, shape.rows)


def _random_trees(
    requests: tuple[Request, ...], nodes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Depths int32 [B, N] and ancestor bits int64 [B, N, W]; garbage where there is no node."""
    parents = torch.full((len(requests), nodes), -1)
    depths = torch.zeros(len(requests), nodes, dtype=torch.int32)
    for node in range(1, nodes):
        low = max(0, node - 9)
        parents[:, node] = torch.randint(low, node, (len(requests),), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    bits = pack_ancestors(dense_ancestors(parents))
    for b, request in enumerate(requests):
        kept = request.rows if request.is_tree else 0
        garbage = torch.randint(
            -(2**62), 2**62, (nodes - kept, num_words(nodes)), generator=generator
        )
        bits[b, kept:] = garbage
        depths[b, kept:] = torch.randint(0, 99, (nodes - kept,), generator=generator).int()
    return depths, bits


def random_shape(seed: int, small: bool = False) -> Shape:
    """A mixed batch of random sizes, options and dtypes; ``small`` for an interpreter."""
    rng = random.Random(seed)
    far = 40 if small else 700
    requests = []
    for _ in range(rng.randint(1, 4 if small else 9)):
        kind = rng.choice(["tree", "tree", "chunk", "decode", "padding"])
        rows = {"tree": rng.choice([1, 5, 16, 33, 64]), "chunk": rng.randint(1, far // 2)}
        rows = {**rows, "decode": 1, "padding": 0}
        if small:
            rows["tree"] = rng.randint(1, 9)
        requests.append(Request(rows[kind], rng.randint(0, far), kind == "tree"))
    kv_heads = rng.choice([1, 2] if small else [1, 2, 4, 8])
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
    quantised = rng.random() < 0.3
    return Shape(
        requests=(*requests, Request(7, 5, True)),
        heads=kv_heads * rng.choice([1, 3] if small else [1, 4, 7, 8]),
        kv_heads=kv_heads,
        head_size=rng.choice([64] if small else [64, 80, 96, 112, 128, 128, 192, 256]),
        dtype=dtype,
        kv_dtype=rng.choice(FP8_DTYPES) if quantised else None,
        block_size=rng.choice([16, 32]),
        window=rng.choice([None, None, 1, 7, 100]),
        softcap=rng.choice([0.0, 0.0, 20.0]),
        sinks=rng.random() < 0.3,
        splits=rng.choice([1, 2, 5] if small else [1, 2, 5, 16]),
        spare_rows=rng.choice([0, 3]),
        slack=rng.choice([0, 0, 300]),
    )


def uniform_batch(
    tree: TreeTensors,
    seq_lens: Tensor,  # int32 [B]
    block_table: Tensor,  # int32 [B, max_blocks]
    is_tree: bool,
    num_splits: int = 1,
    workspace: SplitWorkspace | None = None,
) -> PagedBatch:
    """Requests that all bring the rows of one tree, as a decode step of a server has them."""
    count, nodes, device = len(seq_lens), tree.num_nodes, seq_lens.device
    return PagedBatch(
        cu_query_lens=torch.arange(count + 1, dtype=torch.int32, device=device) * nodes,
        seq_lens=seq_lens,
        block_table=block_table,
        is_tree=torch.full((count,), is_tree, device=device),
        ancestor_bits=tree.ancestor_bits.expand(count, -1, -1),
        depths=tree.depths.expand(count, -1),
        max_query_len=nodes,
        num_splits=num_splits,
        workspace=workspace,
    )


def choose_parts(query: Tensor, key_cache: Tensor, batch: int, nodes: int, length: int) -> int:
    """Into how many parts the keys of a step go.

    ``query`` is [T, Hq, D], ``key_cache`` [num_blocks, block_size, Hkv, D].
    """
    from vllm_medusa.scorer.launch import choose_splits

    heads = (query.shape[1], key_cache.shape[2], query.shape[2])
    kinds = (query.dtype, key_cache.dtype, query.device)
    return choose_splits(batch, *heads, nodes, length, *kinds)
