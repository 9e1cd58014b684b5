"""Is the attention kernel right on this GPU? Against the reference in fp64, on poisoned memory.

Tolerances. ``MOST`` bounds any single output, of values around 1: fp32 sums in another order; half
types round the weights and the output, each by at most u/2 of at most 4 (u = 2**-10, 2**-7).
``RELATIVE`` bounds ||out - ref|| / ||ref||, which sees an error spread thin over many elements. The
interpreter truncates to bf16 in place of rounding, which doubles both. fp8 is exact in all of them.

Each case must notice a planted error, too: it is compared once more with a reference in which one
node no longer sees itself, one flipped bit, and that comparison has to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.problems import Problem, Request, Shape, random_problem, random_shape

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = {F32: 5e-5, F16: 4 * 2**-10, BF16: 4 * 2**-7}
RELATIVE = {F32: 2e-5, F16: 2e-3, BF16: 1.2e-2}
LSE = {F32: 5e-5, F16: 2e-4, BF16: 2e-4}
RANDOM = 32  # random shapes
MIXED = (
    Request(64, 700, True),
    Request(150, 90),
    Request(1, 511),
    Request(0),
    Request(16, 0, True),
    Request(1, 0),
    Request(33, 64, True),
    Request(7, 5, True),
)
FEW = (Request(9, 20, True), Request(5, 9), Request(1, 17), Request(0), Request(6, 0, True))


def cases(small: bool) -> list[Case]:
    """Fixed shapes at the boundaries, random shapes, graphs."""
    shapes = dict(_small_shapes() if small else _shapes())
    found = [_case(name, shape, seed) for seed, (name, shape) in enumerate(shapes.items())]
    return [*found, Case("graph replay, other inputs", replay)]


def _shapes() -> Iterator[tuple[str, Shape]]:
    for dtype in (BF16, F16, F32):
        for kv in (None, E4M3, E5M2):
            shape = Shape(MIXED, dtype=dtype, kv_dtype=kv, splits=3 if kv is None else 1)
            yield f"mixed {_name(dtype)}, cache {_name(kv or dtype)}", shape
    for heads in ((32, 32), (32, 8), (8, 1), (64, 8), (14, 2)):
        shape = Shape(MIXED, heads=heads[0], kv_heads=heads[1], splits=2, spare_rows=3)
        yield f"heads {heads[0]}/{heads[1]}", shape
    for dim in (64, 80, 96, 112, 192, 256):
        for dtype in (BF16, F32):
            yield (
                f"head size {dim} {_name(dtype)}",
                Shape(FEW, head_size=dim, dtype=dtype, splits=2),
            )
    for nodes in (1, 16, 63, 64, 65, 128, 256):
        requests = (Request(nodes, 300, True), Request(nodes, 0, True))
        yield f"{nodes} nodes", Shape(requests, heads=8, kv_heads=8, splits=1 + nodes % 2)
    for window in (1, 7, 100):
        shape = Shape(MIXED, window=window, dtype=F16, splits=1 + window % 2)
        yield f"window {window}", shape
    yield "softcap and sinks", Shape(MIXED, softcap=20.0, sinks=True)
    yield "softcap and sinks in parts", Shape(MIXED, softcap=20.0, sinks=True, splits=7)
    for splits in (16, 64):
        yield (
            f"{splits} parts",
            Shape((Request(64, 6000, True), Request(3, 5, True)), splits=splits),
        )
    yield "loose bounds", Shape(MIXED, slack=500)
    for seed in range(RANDOM):
        yield f"random {seed}", random_shape(seed)


def _small_shapes() -> Iterator[tuple[str, Shape]]:
    narrow: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_size": 16}
    yield "mixed bf16", Shape(FEW, splits=2, **narrow)
    yield "fp8 cache, window", Shape(FEW[:2], kv_dtype=E4M3, window=7, dtype=F16, **narrow)
    yield "65 nodes", Shape((Request(65, 3, True),), dtype=F32, **narrow)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_", "").replace("bfloat", "bf")


def _case(name: str, shape: Shape, seed: int) -> Case:
    def run(lab: Lab) -> Record:
        from vllm_medusa.scorer.paged import paged_tree_attention, uses_kernel

        problem = random_problem(shape, seed, lab.device)
        assert uses_kernel(lab.device), "the kernel would not have run"
        (out, lse), (again, _) = problem.outputs(), problem.outputs()
        problem.call(paged_tree_attention, again, lse)
        problem.call(paged_tree_attention, out, lse)
        record = judge(problem, out, lse, lab)
        record["same_bits_again"] = _same_bits(out, again)
        record["control_noticed"] = not judge(_planted(problem, shape), out, lse, lab)["passed"]
        record["passed"] &= record["same_bits_again"] & record["control_noticed"]
        return record | {"shape": _describe(shape)}

    def launch() -> None:
        from vllm_medusa.scorer.paged import paged_tree_attention

        problem = random_problem(shape, seed, "cpu")
        problem.call(paged_tree_attention, *problem.outputs())

    return Case(name, run, launch)


def judge(problem: Problem, out: torch.Tensor, lse: torch.Tensor, lab: Lab) -> Record:
    """The errors of an output against the reference of ``problem``."""
    expected, expected_lse = problem.expected()
    rows, dtype = problem.rows, problem.query.dtype
    off = out[:rows].double() - expected[:rows]
    lse_off = (lse[:rows].double() - expected_lse[:rows]).abs().amax().item()
    error = off.abs().amax().item()
    relative = (off.norm() / expected[:rows].norm()).item()
    untouched = bool(out[rows:].isnan().all() & lse[rows:].isnan().all())
    loose = 2 if lab.interpreted else 1
    right = (  # a NaN is no less than anything
        error < loose * MOST[dtype] and relative < loose * RELATIVE[dtype] and lse_off < LSE[dtype]
    )
    return {
        "passed": right and untouched,
        "error": error,
        "relative_error": relative,
        "lse_error": lse_off,
        "spare_rows_untouched": untouched,
    }


def _planted(problem: Problem, shape: Shape) -> Problem:
    """The last node of the tree with the fewest keys, where each counts most, misses itself."""
    keys = {b: r.rows + r.context for b, r in enumerate(shape.requests) if r.is_tree}
    request = min(keys, key=lambda b: keys[b])
    return problem.without_self(request, shape.requests[request].rows - 1)


def replay(lab: Lab) -> Record:
    """A graph captured with one batch and replayed with another equals eager, bit by bit."""
    from vllm_medusa.scorer.paged import paged_tree_attention

    sizes: dict[str, Any] = {"splits": 4, "table_width": 64, "num_blocks": 200}
    if lab.interpreted:
        sizes |= {"head_size": 16, "kv_heads": 1, "heads": 2}
    first = (Request(16, 40, True), Request(1, 300), Request(31, 0, True))
    other = (Request(31, 123, True), Request(16, 17), Request(1, 211, True))
    captured = random_problem(Shape(first, **sizes), 1, lab.device)
    wanted = random_problem(Shape(other, **sizes), 2, lab.device)
    out, lse = captured.outputs()
    run = lab.clock.graph(lambda: captured.call(paged_tree_attention, out, lse))
    run()
    before = judge(captured, out, lse, lab)
    for mine, new in zip(captured.buffers(), wanted.buffers(), strict=True):
        mine.copy_(new)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    run()
    record = judge(wanted, out, lse, lab)
    eager, eager_lse = wanted.outputs()
    wanted.call(paged_tree_attention, eager, eager_lse)
    record["equals_eager"] = _same_bits(out, eager) and _same_bits(lse, eager_lse)
    record["passed"] &= record["equals_eager"] & before["passed"]
    return record


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def _describe(shape: Shape) -> Record:
    rows = [f"{'t' if r.is_tree else ''}{r.rows}@{r.context}" for r in shape.requests]
    return {
        "requests": " ".join(rows),
        "heads": f"{shape.heads}/{shape.kv_heads}x{shape.head_size}",
        "dtype": _name(shape.dtype),
        "cache": _name(shape.kv_dtype or shape.dtype),
        "window": shape.window,
        "splits": shape.splits,
    }
