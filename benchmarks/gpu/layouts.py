"""A decode step's attention laid out to be timed: one query, and caches enough to stay cold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.problems import choose_parts, uniform_batch
from benchmarks.gpu.storage import Storage
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace, paged_tree_attention
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.presets import load_preset
from vllm_medusa.tree.topology import TokenTree

BLOCK_SIZE = 16
COLD = 4  # copies of the cache together are this many times the L2
MOST_COPIES = 256


@dataclass(frozen=True)
class Spec:
    """A decode step's attention: ``batch`` requests of ``nodes`` rows behind ``context`` tokens."""

    layout: str
    heads: int
    kv_heads: int
    batch: int
    context: int
    nodes: int
    cache: torch.dtype = torch.bfloat16
    head_size: int = 128
    planned: int = 0  # length that the parts are chosen for, as in a captured graph; 0: its own

    @property
    def name(self) -> str:
        """Unique among the cases."""
        extra = "" if self.cache == torch.bfloat16 else ", fp8 cache"
        if self.planned:
            extra += f", planned for {self.planned}"
        return (
            f"{self.layout}, batch {self.batch}, context {self.context}, {self.nodes} nodes{extra}"
        )

    @property
    def length(self) -> int:
        """Keys of a request."""
        return self.context + self.nodes

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token."""
        return 2 * self.kv_heads * self.head_size * self.cache.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values that the step needs."""
        return self.batch * self.length * self.token_bytes

    @property
    def blocks(self) -> int:
        """Of the cache: a multiple of 16 for every request."""
        return self.batch * -(-self.length // (16 * BLOCK_SIZE)) * 16

    @property
    def flop(self) -> int:
        """Operations of both products."""
        return 4 * self.batch * self.nodes * self.heads * self.length * self.head_size


@dataclass(frozen=True)
class Setup:
    """A spec in memory: one query, and as many caches as it takes to keep the L2 cold."""

    spec: Spec
    query: Tensor  # [T, Hq, D]
    out: Tensor
    caches: list[Tensor]  # [num_blocks, Hkv, block_size, 2 D]
    flat: list[Tensor]  # the same memory
    batch: PagedBatch
    scale: float

    def attend(self, copy: int = 0) -> None:
        """One call, on one of the copies."""
        keys, values = self.caches[copy].transpose(1, 2).split(self.spec.head_size, -1)
        paged_tree_attention(self.query, keys, values, self.batch, self.scale, out=self.out)


def step_tree(nodes: int) -> TokenTree:
    """A tree of so many nodes that uses five heads: their best choices, then a published tree's."""
    chain = [(0,) * depth for depth in range(1, 6)]
    paths = [*chain, *(p for p in load_preset("vicuna_7b_stage2").paths if p not in chain)]
    return TokenTree.from_paths(paths[: nodes - 1]) if nodes > 1 else TokenTree(())


def to_compile(spec: Spec) -> Setup:
    """What launches the same kernels from a cache of a few blocks, in host memory, unfilled."""
    storage = Storage("cpu", 1 << 40, fill=False)
    small = replace(spec, context=min(spec.context, 128), planned=spec.planned or spec.length)
    return setup(small, storage, 1)


def setup(spec: Spec, storage: Storage, copies: int, splits: int | None = None) -> Setup:
    """Lay a spec out: blocks in random order, queries as they lie in a packed projection."""
    device, dim = storage.device, spec.head_size
    shape = (spec.blocks, spec.kv_heads, BLOCK_SIZE, 2 * dim)
    flat = storage.take(copies, math.prod(shape), spec.cache)
    caches = [memory.view(shape) for memory in flat]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(spec.blocks, generator=generator).int()
    table = ids.view(spec.batch, -1).to(device)
    rows = spec.batch * spec.nodes
    packed = torch.empty(
        rows, spec.heads + 2 * spec.kv_heads, dim, dtype=torch.bfloat16, device=device
    )
    query = packed[:, : spec.heads]
    if storage.fill:
        packed.normal_()
    tree = TreeTensors.from_tree(step_tree(spec.nodes), device)
    if splits is None:
        keys = caches[0].transpose(1, 2)[..., :dim]
        splits = choose_parts(query, keys, spec.batch, spec.nodes, spec.planned or spec.length)
    space = SplitWorkspace.allocate(rows * spec.heads * splits, dim, device) if splits > 1 else None
    lens = torch.full((spec.batch,), spec.length, dtype=torch.int32, device=device)
    batch = uniform_batch(tree, lens, table, spec.nodes > 1, splits, space)
    return Setup(spec, query, torch.empty_like(query), caches, flat, batch, dim**-0.5)


def copies_of(spec: Spec, storage: Storage, l2_bytes: int) -> int:
    """How many caches to go round: cold together, as far as there is memory for them."""
    wanted = -(-COLD * l2_bytes // spec.kv_bytes)
    fit = storage.limit // (spec.blocks * BLOCK_SIZE * spec.token_bytes + 512)
    return max(1, min(wanted, fit, MOST_COPIES))  # where none fits, the storage says so


def check(made: Setup) -> float:
    """||out - ref|| / ||ref|| at the last request, in fp32 by plain products."""
    spec, last = made.spec, made.spec.batch - 1
    made.attend()
    blocks = made.batch.block_table[last].long()
    kept = made.caches[0].view(torch.uint8)[blocks].view(spec.cache)  # fp8 can't be indexed
    kept = kept.transpose(1, 2).float().flatten(0, 1)[: spec.length]
    keys, values = kept.split(spec.head_size, -1)  # [L, Hkv, D]
    rows = slice(last * spec.nodes, (last + 1) * spec.nodes)
    group = spec.heads // spec.kv_heads
    query = made.query[rows].float().unflatten(1, (spec.kv_heads, group))  # [N, Hkv, G, D]
    logits = torch.einsum("nkgd,lkd->kgnl", query, keys) * made.scale
    tree = TreeTensors.from_tree(step_tree(spec.nodes), logits.device)
    logits[..., spec.context :].masked_fill_(~tree.ancestors, float("-inf"))
    expected = torch.einsum("kgnl,lkd->nkgd", logits.softmax(-1), values).flatten(1, 2)
    off = made.out[rows].float() - expected
    return (off.norm() / expected.norm()).item()
