"""Time of attention, relative to the time to read the keys and values once.

    python -m benchmarks kernels step

Calls run back to back in a CUDA graph, each on a different copy of the cache, so that the keys are
never in the L2 cache, as in the layers of a model. For comparison, on contiguous caches of the same
shapes: torch's FlashAttention and cuDNN without a mask, which read the same amount but do not
support trees, and its memory-efficient kernel with the tree's mask. For them too, query heads that
share a key head are folded into the rows. The result of the last request is checked every time.

    floor        bytes of keys and values, read once, over the measured copy bandwidth
    arithmetic   4 * rows * heads * keys * head size over the measured bf16 matmul rate; where it
                 exceeds the floor, the floor is not reachable

Needs only torch and Triton.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.case import Case, Plot, Row, attempt, titled
from benchmarks.gpu.clock import Clock, here
from benchmarks.gpu.decoder import BLOCK_SIZE, choose_parts, step_batch, step_tree
from benchmarks.gpu.model import paged_tree_attention
from vllm_medusa.job import Progress
from vllm_medusa.options import FromZero, Options, Positive, option
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace
from vllm_medusa.scorer.tiles import Tiles
from vllm_medusa.tree.batch import TreeTensors

LAYOUTS = {  # query heads, key heads
    "Llama-2-7B": (32, 32),
    "Llama-3-8B": (32, 8),
    "Llama-3-70B, 1 of 8 GPUs": (8, 1),
    "Llama-3-70B": (64, 8),
}
RELATIVE = 1.2e-2  # for bf16: ||out - ref|| / ||ref||
COLD = 4  # total size of cache copies, relative to the L2 cache
MAX_COPIES = 256
CACHE_BYTES = 40 << 30
MIN_US = 300.0  # shorter graphs can't be timed accurately


class KernelsOptions(Options):
    """Shapes; all are measured with every layout."""

    batches: tuple[Positive, ...] = option(default=(1, 4, 16, 64))
    contexts: tuple[Positive, ...] = option(default=(4096, 16384, 1024, 8192, 32768))
    nodes: tuple[Positive, ...] = option("rows per request; 1 is plain decoding", default=(64, 16))
    fp8: bool = option("e4m3 caches instead of bf16", default=False)
    chunk: FromZero = option("rows of a prompt in addition to trees", default=0)
    head_size: Positive = option(default=128)
    stages: FromZero = option("stages of Triton's pipeline; 0: the default", default=0)
    per_sm: FromZero = option("programs per multiprocessor; 0: the default", default=0)


@dataclass(frozen=True)
class Spec:
    """A decode step's attention: ``batch`` requests of ``nodes`` rows after ``context`` tokens."""

    layout: str
    heads: int
    kv_heads: int
    batch: int
    context: int
    nodes: int
    cache: torch.dtype = torch.bfloat16
    head_size: int = 128
    chunk: int = 0

    @property
    def lengths(self) -> list[int]:
        """Keys per request."""
        return [self.context + self.nodes] * self.batch + [self.chunk] * bool(self.chunk)

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.batch * self.nodes + self.chunk

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values that the step reads."""
        return sum(self.lengths) * 2 * self.kv_heads * self.head_size * self.cache.itemsize

    @property
    def flop(self) -> int:
        """Operations of both products; half of the chunk's square is masked."""
        pairs = self.batch * self.nodes * (self.context + self.nodes) + self.chunk**2 // 2
        return 4 * pairs * self.heads * self.head_size

    @property
    def width(self) -> int:
        """Blocks per request in the table: a multiple of 16."""
        return -(-max(self.lengths) // (16 * BLOCK_SIZE)) * 16

    @property
    def cache_elements(self) -> int:
        """Elements of one copy."""
        blocks = len(self.lengths) * self.width
        return blocks * self.kv_heads * BLOCK_SIZE * 2 * self.head_size


@dataclass(frozen=True)
class Setup:
    """A spec in memory: one query, and enough caches that no call hits the L2 cache."""

    spec: Spec
    query: Tensor  # [T, Hq, D]
    out: Tensor
    flat: Tensor  # [copies, elements of a cache]
    batch: PagedBatch

    def cache(self, copy: int) -> Tensor:
        """[num_blocks, Hkv, block_size, 2 D]."""
        spec = self.spec
        return self.flat[copy].view(-1, spec.kv_heads, BLOCK_SIZE, 2 * spec.head_size)

    def attend(self, copy: int = 0) -> None:
        """One call, on one of the copies."""
        dim = self.spec.head_size
        keys, values = self.cache(copy).transpose(1, 2).split(dim, -1)
        paged_tree_attention(self.query, keys, values, self.batch, dim**-0.5, out=self.out)


class Memory:
    """One allocation for all timed caches, filled once with random values.

    A cache can take 34 GB: allocating and filling it for each shape would take longer than all
    measurements. It is not filled with zeros, because a GPU runs at higher clocks with them.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.limit = 1 << 24
        if device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            self.limit = min(CACHE_BYTES, int(0.4 * total))
        self._pool = torch.empty(0)

    def take(self, copies: int, elements: int, dtype: torch.dtype) -> Tensor:
        """``copies`` of ``elements`` values, [copies, elements]; random, for fp8 from 0 to 1.875.

        Raises ValueError: not enough memory.
        """
        size = copies * elements * dtype.itemsize
        if size > self.limit:
            raise ValueError(f"{size / 1e9:.1f} GB of cache; {self.limit / 1e9:.1f} are free")
        if self._pool.dtype != dtype:
            del self._pool
            self._pool = torch.empty(self.limit // dtype.itemsize, dtype=dtype, device=self.device)
            if dtype.itemsize == 1:
                self._pool.view(torch.uint8).random_(0, 0x40)
            else:
                self._pool.normal_()
        return self._pool[: copies * elements].view(copies, elements)


def setup(spec: Spec, memory: Memory, l2_bytes: int) -> Setup:
    """Lay out a spec: blocks in random order, queries as in a packed projection."""
    device, dim = memory.device, spec.head_size
    fit = memory.limit // (spec.cache_elements * spec.cache.itemsize)
    copies = max(1, min(-(-COLD * l2_bytes // spec.kv_bytes), fit, MAX_COPIES))
    flat = memory.take(copies, spec.cache_elements, spec.cache)
    count = len(spec.lengths)
    ids = torch.randperm(count * spec.width, generator=torch.Generator().manual_seed(0)).int()
    packed = torch.randn(spec.rows, spec.heads + 2 * spec.kv_heads, dim).bfloat16().to(device)
    query = packed[:, : spec.heads]
    tree = TreeTensors.from_tree(step_tree(spec.nodes), device)
    splits = 1
    if not spec.chunk:  # whose rows alone fill the device
        keys = flat[0].view(-1, BLOCK_SIZE, spec.kv_heads, 2 * dim)[..., :dim]
        splits = choose_parts(query, keys, spec.batch, spec.nodes, spec.lengths[0])
    space = None
    if splits > 1:
        space = SplitWorkspace.allocate(spec.rows * spec.heads * splits, dim, device)
    batch = step_batch(
        tree,
        torch.tensor(spec.lengths, dtype=torch.int32, device=device),
        ids.view(count, -1).to(device),
        chunk=spec.chunk,
        num_splits=splits,
        workspace=space,
    )
    return Setup(spec, query, torch.empty_like(query), flat, batch)


def check(made: Setup) -> float:
    """||out - ref|| / ||ref|| at the last tree and the chunk, in fp32 with plain products."""
    spec = made.spec
    made.attend()
    tree = TreeTensors.from_tree(step_tree(spec.nodes), made.out.device).ancestors
    errors = [_error(made, spec.batch - 1, spec.nodes, tree)]
    if spec.chunk:
        causal = torch.ones(spec.chunk, spec.chunk, dtype=torch.bool, device=made.out.device)
        errors.append(_error(made, spec.batch, spec.chunk, causal.tril()))
    return max(errors)


def _error(made: Setup, request: int, rows: int, seen: Tensor) -> float:
    """The error of one request; ``seen`` [rows, rows]: its own rows that each row attends to."""
    spec, length = made.spec, made.spec.lengths[request]
    blocks = made.batch.block_table[request].long()
    kept = made.cache(0).view(torch.uint8)[blocks].view(spec.cache)  # indexing needs bytes, not fp8
    kept = kept.transpose(1, 2).float().flatten(0, 1)[:length]
    keys, values = kept.split(spec.head_size, -1)  # [L, Hkv, D]
    start = request * spec.nodes
    query = made.query[start : start + rows].float()
    query = query.unflatten(1, (spec.kv_heads, -1))  # [N, Hkv, G, D]
    logits = torch.einsum("nkgd,lkd->kgnl", query, keys) * spec.head_size**-0.5
    logits[..., length - rows :].masked_fill_(~seen, -math.inf)
    expected = torch.einsum("kgnl,lkd->nkgd", logits.softmax(-1), values).flatten(1, 2)
    off = made.out[start : start + rows].float() - expected
    return (off.norm() / expected.norm()).item()


def rivals(made: Setup) -> dict[str, Callable[[int], Tensor]]:
    """Kernels of torch for the same rows, over the same memory as contiguous caches."""
    spec = made.spec
    dim, length = spec.head_size, spec.lengths[0]
    query = made.query.view(spec.batch, spec.nodes, spec.kv_heads, -1, dim)
    folded = query.permute(0, 2, 1, 3, 4).reshape(spec.batch, spec.kv_heads, -1, dim).contiguous()
    shape = (spec.batch, length, spec.kv_heads, dim)
    half = math.prod(shape)
    keys, values = (
        [memory[i * half : (i + 1) * half].view(shape).transpose(1, 2) for memory in made.flat]
        for i in range(2)
    )
    seen = torch.ones(spec.nodes, length, dtype=torch.bool, device=folded.device)
    seen[:, spec.context :] = TreeTensors.from_tree(step_tree(spec.nodes)).ancestors
    mask = torch.zeros(seen.shape, dtype=folded.dtype, device=folded.device)
    mask = mask.masked_fill(~seen, -math.inf).repeat_interleave(spec.heads // spec.kv_heads, 0)
    mask = mask.expand(spec.batch, spec.kv_heads, -1, -1)

    def call(backend: SDPBackend, bias: Tensor | None, copy: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(folded, keys[copy], values[copy], bias)

    return {
        "flash": partial(call, SDPBackend.FLASH_ATTENTION, None),
        "cudnn": partial(call, SDPBackend.CUDNN_ATTENTION, None),
        "masked": partial(call, SDPBackend.EFFICIENT_ATTENTION, mask),
    }


def specs(options: KernelsOptions) -> Iterator[Spec]:
    """All shapes, the most informative first."""
    cache = torch.float8_e4m3fn if options.fp8 else torch.bfloat16
    shapes = product(options.batches, options.contexts, options.nodes, LAYOUTS.items())
    for batch, context, nodes, (layout, heads) in shapes:
        size, chunk = options.head_size, options.chunk
        yield Spec(layout, *heads, batch, context, nodes, cache, size, chunk)


@contextmanager
def other_tiles(stages: int, per_sm: int) -> Iterator[None]:
    """Within the block, use these values instead of those chosen by `tile_sizes`; 0: unchanged.

    Both values were chosen without a GPU; this measures alternatives.
    """
    from vllm_medusa.scorer import launch

    choose = launch.tile_sizes

    def tile_sizes(*shape: Any) -> Tiles:
        chosen = choose(*shape)
        return replace(
            chosen, num_stages=stages or chosen.num_stages, per_sm=per_sm or chosen.per_sm
        )

    with mock.patch.object(launch, "tile_sizes", tile_sizes):
        yield


def run(options: KernelsOptions, progress: Progress) -> Iterator[Row]:
    """A row for each shape; times in microseconds of one call."""
    device, clock = here()
    with other_tiles(options.stages, options.per_sm):
        memory, rates = Memory(device), clock.rates()
        progress.note(", ".join(f"{name} {value:.3g}" for name, value in rates.items()))
        for spec in specs(options):
            shown = f"{spec.layout}, batch {spec.batch}, context {spec.context}, {spec.nodes} nodes"
            names = ("layout", "batch", "context", "nodes", "chunk")
            what = {"name": shown, **{name: getattr(spec, name) for name in names}}
            what |= {"stages": options.stages, "per_sm": options.per_sm}
            yield attempt(what, partial(measure, what, spec, memory, clock, rates))


def measure(
    what: dict[str, Any], spec: Spec, memory: Memory, clock: Clock, rates: dict[str, float]
) -> Row:
    """Check one result, then time everything."""
    made = setup(spec, memory, clock.l2_bytes)
    error = check(made)
    if not error < RELATIVE * (1 if memory.device == "cuda" else 2):
        return Row(what, failed=f"relative error of {error:.3g}")
    floor = spec.kv_bytes / rates["copy_bytes_per_s"] * 1e6
    copies = len(made.flat)
    calls = max(copies, min(200, int(MIN_US / max(floor, 1.0)))) if floor else copies
    calls = calls if memory.device == "cuda" else 1

    def microseconds(attend: Callable[[int], Any]) -> float:
        def call() -> None:
            for number in range(calls):
                attend(number % copies)

        return statistics.median(clock.graph(call, repeats=7)) / calls

    ours = microseconds(made.attend)
    numbers: dict[str, Any] = {
        "relative_error": error,
        "splits": made.batch.num_splits,
        "copies": copies,
        "floor_us": floor,
        "arithmetic_us": spec.flop / rates["matmul_flop_per_s"] * 1e6,
        "ours_us": ours,
        "of_floor": floor / ours,
        "ours_eager_us": clock.wall(made.attend),
        **rates,
    }
    if spec.cache == torch.bfloat16 and not spec.chunk:
        for name, attend in rivals(made).items():
            try:
                numbers[f"{name}_us"] = microseconds(attend)
            except (RuntimeError, TypeError) as reason:  # a backend that does not support the shape
                numbers[f"{name}_reason"] = str(reason)[:200]
    return Row(what, numbers, right=True)


CASE = Case(
    KernelsOptions,
    run,
    {
        **titled("layout batch context nodes"),
        "splits": ("parts", ""),
        "ours_us": ("ours us", ".1f"),
        "of_floor": ("floor / ours", ".0%"),
        "floor_us": ("floor us", ".1f"),
        "arithmetic_us": ("arithmetic us", ".1f"),
        "flash_us": ("flash, no tree us", ".1f"),
        "cudnn_us": ("cuDNN, no tree us", ".1f"),
        "masked_us": ("masked us", ".1f"),
        "ours_eager_us": ("ours eager us", ".1f"),
    },
    quick={"batches": (1, 16), "contexts": (4096,)},
    plot=Plot("context", ("of_floor",), ("layout", "batch", "nodes")),
)
