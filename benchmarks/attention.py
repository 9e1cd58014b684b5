"""Time one layer of tree attention on the CPU against vLLM's causal kernel.

    OMP_NUM_THREADS=1 python -m benchmarks attention
    OMP_NUM_THREADS=1 python -m benchmarks attention --strategies    # ways to group requests

Every time is the least of several short runs, so that a shared machine disturbs it little. The
causal kernel computes a chain, not a tree: it is what plain decoding of the same rows would cost.
Of small problems (the reference is slow) the result is compared with the fp64 reference.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.case import Case, Row, titled
from vllm_medusa.job import Progress
from vllm_medusa.options import Options, Positive, option
from vllm_medusa.scorer import grouping
from vllm_medusa.scorer.cpu import tree_attention
from vllm_medusa.scorer.layout import CacheLayout, gather_tokens
from vllm_medusa.scorer.metadata import AttentionPlan, build_metadata
from vllm_medusa.scorer.reference import attention_reference, visible_keys
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.topology import TokenTree

AMX = torch.cpu._is_amx_tile_supported()
STRATEGIES = {"one_by_one_us": (-1, 0), "all_padded_us": (1 << 60, 1 << 60)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """One layer's input."""

    query: Tensor  # [rows, num_heads, head_size]
    kv_cache: Tensor
    tree: TreeBatch
    base: Tensor  # int32 [B]
    block_table: Tensor  # int32 [B, blocks]
    meta: AttentionPlan
    scale: float

    def run(self, out: Tensor) -> Tensor:
        """One layer of tree attention."""
        return tree_attention(self.query, self.kv_cache, self.meta, self.scale, out=out)


def make_problem(
    nodes: int, context: int, batch: int, dtype: torch.dtype, heads: tuple[int, int], dim: int
) -> Problem:
    """Equal trees of ``nodes`` nodes, contexts spread over +-10 % of ``context``."""
    generator = torch.Generator().manual_seed(0)
    tokens = _tree(nodes)
    tree = TreeBatch.from_static(TreeTensors.from_tree(tokens), torch.full((batch,), nodes))
    spread = torch.linspace(0.9, 1.1, batch) if batch > 1 else torch.ones(1)
    base = (spread * context).to(torch.int32)
    block = 128
    count = -(-(int(base.max()) + nodes) // block)
    table = torch.randperm(batch * count, generator=generator).to(torch.int32).view(batch, count)
    kv_cache = torch.randn(batch * count, heads[1], block, 2 * dim, generator=generator).to(dtype)
    query = torch.randn(batch * nodes, heads[0], dim, generator=generator).to(dtype)
    layout = CacheLayout.of(kv_cache, _isa(dtype))
    meta = build_metadata(tree, base, table, layout, heads[0])
    return Problem(query, kv_cache, tree, base, table, meta, dim**-0.5)


def _isa(dtype: torch.dtype) -> str:
    """What vLLM chooses on this CPU."""
    return "amx" if AMX and dtype == torch.bfloat16 else "vec"


def _tree(nodes: int) -> TokenTree:
    """The best-first prefix of a wide tree."""
    return TokenTree.dense((5, 3, 2, 2)).prefix(max(nodes, 2))


def causal_kernel(problem: Problem) -> Callable[[Tensor], Tensor] | None:
    """The stock kernel on the same rows; None without a CPU build of vLLM."""
    try:
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    except ImportError:
        return None
    nodes, (rows, heads, dim) = int(problem.tree.num_nodes[0]), problem.query.shape
    num_blocks, kv_heads, block, _ = problem.kv_cache.shape
    halves = problem.kv_cache.view(num_blocks, kv_heads, 2 * block, dim).chunk(2, dim=2)
    lens = problem.base + nodes
    starts = torch.arange(0, rows + 1, nodes, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        seq_lens=lens,
        dtype=problem.query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=problem.meta.layout.isa,
        enable_kv_split=True,
    )

    def run(out: Tensor) -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query=problem.query,
            key_cache=halves[0],
            value_cache=halves[1],
            output=out,
            query_start_loc=starts,
            seq_lens=lens,
            scale=problem.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=problem.block_table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out

    return run


def least_time(call: Callable[[], object], budget: float = 0.15) -> float:
    """Microseconds of the quickest run within about ``budget`` seconds."""
    call()
    best = float("inf")
    end = time.perf_counter() + budget
    runs = 0
    while runs < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best * 1e6


def error_of(problem: Problem, out: Tensor) -> float | None:
    """The largest difference to the reference; None where that would take too long."""
    if problem.query.shape[0] * int(problem.base.max()) > 20_000:
        return None
    return float((problem.run(out).double() - expected(problem)).abs().max())


def expected(problem: Problem) -> Tensor:
    """The reference's output, fp64, from slots and parents."""
    block, nodes = problem.kv_cache.shape[2], int(problem.tree.num_nodes[0])
    outputs = []
    for b, context in enumerate(problem.base.tolist()):
        index = torch.arange(context + nodes)
        slots = problem.block_table[b, index // block].long() * block + index % block
        tokens = gather_tokens(problem.kv_cache, problem.meta.layout.isa, slots)
        seen = visible_keys(context, problem.tree.parents[b].tolist())
        query = problem.query[b * nodes : (b + 1) * nodes]
        outputs.append(attention_reference(query, *tokens, seen, problem.scale)[0])
    return torch.cat(outputs)


class AttentionOptions(Options):
    """Which shapes; the defaults are Qwen2.5-0.5B's."""

    dtypes: tuple[Literal["bf16", "fp32", "fp16"], ...] = option(default=("bf16", "fp32"))
    nodes: tuple[Positive, ...] = option("rows of each request", default=(1, 8, 16, 64))
    contexts: tuple[Positive, ...] = option(default=(64, 512, 2048))
    batches: tuple[Positive, ...] = option(default=(1, 8, 32))
    heads: tuple[Positive, ...] = option("query and key heads", default=(14, 2))
    head_size: Positive = option(default=64)
    strategies: bool = option("also time other ways to group the requests", default=False)


def run(options: AttentionOptions, progress: Progress) -> Iterator[Row]:
    """A row for each shape."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    shapes = itertools.product(options.dtypes, options.nodes, options.contexts, options.batches)
    for dtype, nodes, context, batch in shapes:
        what: dict[str, Any] = {"dtype": dtype, "nodes": nodes, "context": context, "batch": batch}
        what["name"] = f"{dtype}, {nodes} nodes, context {context}, batch {batch}"
        yield measure(what, options)


def measure(what: dict[str, Any], options: AttentionOptions) -> Row:
    """Microseconds of the plan, the layer and the stock kernel on the same rows."""
    heads = (options.heads[0], options.heads[1])
    make = partial(
        make_problem,
        what["nodes"],
        what["context"],
        what["batch"],
        DTYPES[what["dtype"]],
        heads,
        options.head_size,
    )
    problem = make()
    out = torch.empty_like(problem.query)
    error = error_of(problem, out)
    if error is not None and not error < 2e-2:
        return Row(what, failed=f"its result differs from the reference by {error}")
    arguments = (problem.tree, problem.base, problem.block_table, problem.meta.layout, heads[0])
    numbers = {
        "error": error,
        "groups": len(problem.meta.groups),
        "plan_us": least_time(lambda: build_metadata(*arguments), 0.03),
        "layer_us": least_time(lambda: problem.run(out)),
    }
    if (stock := causal_kernel(problem)) is not None:
        numbers["causal_us"] = least_time(lambda: stock(out))
    kept = grouping.GROUP_COST, grouping.GROUP_LIMIT
    for name, setting in STRATEGIES.items() if options.strategies else ():
        grouping.GROUP_COST, grouping.GROUP_LIMIT = setting
        other = make()
        grouping.GROUP_COST, grouping.GROUP_LIMIT = kept
        numbers[name] = least_time(partial(other.run, out))
    return Row(what, numbers, right=True)


CASE = Case(
    AttentionOptions,
    run,
    {
        **titled("dtype nodes context batch groups"),
        "plan_us": ("plan us (once a step)", ".0f"),
        "layer_us": ("layer us", ".0f"),
        "causal_us": ("causal kernel us", ".0f"),
        **titled("one_by_one_us all_padded_us", ".0f"),
    },
    quick={"dtypes": ("bf16",), "nodes": (8, 64), "contexts": (512,), "batches": (1, 8)},
)
