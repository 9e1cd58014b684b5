"""How long attention takes, against the time in which the memory could have been read once.

Calls run back to back in a CUDA graph, each on another copy of the cache, so that none finds its
keys in the L2: as the layers of a model do. Beside it, on contiguous caches of the same shapes and
in the same way: torch's FlashAttention and cuDNN without any mask, which read as much and know no
tree, and its memory-efficient kernel with the tree's mask. Heads that share a key head are folded
into the rows for them too. Before it is timed a result is checked, at one request.

    floor        bytes of keys and values, read once, over the measured copy bandwidth
    arithmetic   4 * rows * heads * keys * head size over the measured bf16 matmul rate; where it
                 exceeds the floor, no kernel can come near the floor
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.problems import choose_parts, uniform_batch
from benchmarks.gpu.storage import Storage
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace, paged_tree_attention
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.presets import load_preset
from vllm_medusa.tree.topology import TokenTree

LAYOUTS = {  # query heads, key heads
    "Llama-2-7B": (32, 32),
    "Llama-3-8B": (32, 8),
    "Llama-3-70B, 1 of 8 GPUs": (8, 1),
    "Llama-3-70B": (64, 8),
}
BATCHES = (1, 4, 16, 64)
CONTEXTS = (4096, 16384, 1024, 8192, 32768)  # those that tell most first
BLOCK_SIZE = 16
COLD = 4  # copies of the cache together are this many times the L2
MOST_COPIES = 256
ENOUGH_US = 300.0  # a graph shorter than this is not timed well
RELATIVE = 1.2e-2  # of bf16, as in `attention_checks`


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


def cases(small: bool) -> list[Case]:
    """Every layout, batch, context and number of nodes.

    Then a few in bounds much too large, as a graph has that was captured for any length; a lone
    row, which is plain decoding; and fp8 caches.
    """
    if small:
        return [_case(Spec("tiny", 4, 2, 2, 40, 5, head_size=16))]
    specs = [
        Spec(layout, *heads, batch, context, nodes)
        for batch in BATCHES
        for context in CONTEXTS
        for nodes in (64, 16)
        for layout, heads in LAYOUTS.items()
    ]
    plain = [Spec(n, *h, b, 4096, 1) for n, h in LAYOUTS.items() for b in (1, 16)]
    fp8 = [
        Spec(n, *h, b, 8192, 64, torch.float8_e4m3fn) for n, h in LAYOUTS.items() for b in (1, 16)
    ]
    loose = [Spec(n, *h, b, 4096, 64, planned=32768) for n, h in LAYOUTS.items() for b in (1, 4)]
    return [_case(spec) for spec in (*specs, *loose, *plain, *fp8)]


def _case(spec: Spec) -> Case:
    def launch(device: str) -> None:
        setup(spec, Storage(device, 1 << 40, fill=False), 1).attend()

    return Case(spec.name, partial(measure, spec), launch)


def step_tree(nodes: int) -> TokenTree:
    """A tree of so many nodes that uses five heads: their best choices, then a published tree's."""
    chain = [(0,) * depth for depth in range(1, 6)]
    paths = [*chain, *(p for p in load_preset("vicuna_7b_stage2").paths if p not in chain)]
    return TokenTree.from_paths(paths[: nodes - 1]) if nodes > 1 else TokenTree(())


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


def measure(spec: Spec, lab: Lab) -> Record:
    """Check one result, then time everything."""
    copies = copies_of(spec, lab.storage, int(lab.machine.get("l2_bytes", 1 << 16)))
    made = setup(spec, lab.storage, copies)
    error = check(made)
    floor, arithmetic = floors(spec, lab)
    calls = max(copies, min(200, int(ENOUGH_US / max(floor or 1.0, 1.0))))
    if lab.device != "cuda":
        calls = 1
    record: Record = {
        "passed": error < RELATIVE * (2 if lab.interpreted else 1),
        "relative_error": error,
        **describe(spec),
        "splits": made.batch.num_splits,
        "copies": copies,
        "floor_us": floor,
        "arithmetic_us": arithmetic,
        **timed("ours", made.attend, copies, calls, lab),
        "ours_eager_us": statistics.median(lab.clock.wall(made.attend)),
    }
    if spec.cache == torch.bfloat16:
        for name, attend in rivals(made).items():
            try:
                record |= timed(name, attend, copies, calls, lab)
            except (RuntimeError, TypeError) as reason:  # a backend that doesn't take the shape
                record[f"{name}_us"] = None
                record[f"{name}_reason"] = str(reason)[:200]
    return record


def describe(spec: Spec) -> Record:
    """The spec's own fields."""
    fields = ("layout", "heads", "kv_heads", "batch", "context", "nodes", "planned", "kv_bytes")
    cache = str(spec.cache).removeprefix("torch.")
    return {name: getattr(spec, name) for name in fields} | {"cache": cache}


def floors(spec: Spec, lab: Lab) -> tuple[float | None, float | None]:
    """Microseconds that memory and arithmetic take at the least; None where not measured."""
    bandwidth = lab.machine.get("copy_bytes_per_s")
    rate = lab.machine.get("matmul_flop_per_s")
    return (
        spec.kv_bytes / bandwidth * 1e6 if bandwidth else None,
        spec.flop / rate * 1e6 if rate else None,
    )


def timed(name: str, attend: Callable[[int], Any], copies: int, calls: int, lab: Lab) -> Record:
    """Microseconds of a call in a graph that goes round the copies: median, least, most."""

    def run() -> None:
        for call in range(calls):
            attend(call % copies)

    times = [time / calls for time in lab.clock.device(lab.clock.graph(run), repeats=7)]
    return {
        f"{name}_us": statistics.median(times),
        f"{name}_min_us": min(times),
        f"{name}_max_us": max(times),
    }


def rivals(made: Setup) -> dict[str, Callable[[int], Tensor]]:
    """What torch offers for the same rows, over the same memory as contiguous caches."""
    spec = made.spec
    group, dim, length = spec.heads // spec.kv_heads, spec.head_size, spec.length
    query = made.query.view(spec.batch, spec.nodes, spec.kv_heads, group, dim)
    folded = query.permute(0, 2, 1, 3, 4).reshape(spec.batch, spec.kv_heads, -1, dim).contiguous()
    half = spec.batch * length * spec.kv_heads * dim
    shape = (spec.batch, length, spec.kv_heads, dim)
    keys, values = (
        [memory[i * half : (i + 1) * half].view(shape).transpose(1, 2) for memory in made.flat]
        for i in range(2)
    )
    seen = torch.ones(spec.nodes, length, dtype=torch.bool, device=folded.device)
    seen[:, spec.context :] = TreeTensors.from_tree(step_tree(spec.nodes)).ancestors
    mask = torch.zeros(seen.shape, dtype=folded.dtype, device=folded.device)
    mask = mask.masked_fill(~seen, float("-inf")).repeat_interleave(group, 0)
    mask = mask.expand(spec.batch, spec.kv_heads, -1, -1)

    def call(backend: SDPBackend, bias: Tensor | None, copy: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(folded, keys[copy], values[copy], bias)

    return {
        "flash": partial(call, SDPBackend.FLASH_ATTENTION, None),
        "cudnn": partial(call, SDPBackend.CUDNN_ATTENTION, None),
        "masked": partial(call, SDPBackend.EFFICIENT_ATTENTION, mask),
    }


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
