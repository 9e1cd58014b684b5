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

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.layouts import Setup, Spec, check, copies_of, setup, step_tree, to_compile
from benchmarks.gpu.mixed_speed import Mixed
from vllm_medusa.tree.batch import TreeTensors

LAYOUTS = {  # query heads, key heads
    "Llama-2-7B": (32, 32),
    "Llama-3-8B": (32, 8),
    "Llama-3-70B, 1 of 8 GPUs": (8, 1),
    "Llama-3-70B": (64, 8),
}
BATCHES = (1, 4, 16, 64)
CONTEXTS = (4096, 16384, 1024, 8192, 32768)  # those that tell most first
ENOUGH_US = 300.0  # a graph shorter than this is not timed well
RELATIVE = 1.2e-2  # of bf16, as in `attention_checks`


def cases(small: bool) -> list[Case]:
    """Every layout, batch, context and number of nodes.

    First trees beside a prompt. Then a few in bounds much too large, as a graph has that was
    captured for any length; a lone row, which is plain decoding; and fp8 caches.
    """
    if small:
        tiny = Mixed("tiny", 4, 2, trees=2, context=20, nodes=5, chunk=40, head_size=16)
        return [_case(Spec("tiny", 4, 2, 2, 40, 5, head_size=16)), tiny.case()]
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
    mixed = [Mixed(name, *LAYOUTS[name]).case() for name in ("Llama-3-8B", "Llama-2-7B")]
    return [*mixed, *(_case(spec) for spec in (*specs, *loose, *plain, *fp8))]


def _case(spec: Spec) -> Case:
    return Case(spec.name, partial(measure, spec), lambda: to_compile(spec).attend())


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
