"""Time one layer of tree attention on the CPU against vLLM's causal kernel.

The tables of benchmarks/results/tree_attention.md come from

    OMP_NUM_THREADS=1 python -m benchmarks.tree_attention
    OMP_NUM_THREADS=1 python -m benchmarks.tree_attention --strategies

Every time is the least of several short runs, so that a shared machine disturbs it little. The
causal kernel computes a chain, not a tree: it is what plain decoding of the same rows would cost.
Before anything is timed the result is compared with the fp64 reference.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.scorer import grouping
from vllm_medusa.scorer.cpu import tree_attention
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.metadata import TreeAttentionMetadata, build_metadata
from vllm_medusa.scorer.reference import tree_attention_reference
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.topology import TokenTree

AMX = torch.cpu._is_amx_tile_supported()
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """One layer's input."""

    query: Tensor  # [rows, num_heads, head_size]
    kv_cache: Tensor
    tree: TreeBatch
    base: Tensor  # int32 [B]
    block_table: Tensor  # int32 [B, blocks]
    meta: TreeAttentionMetadata
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


def check(problem: Problem, out: Tensor) -> None:
    """Refuse to time a wrong result; the reference is slow, so only small problems are checked."""
    if problem.query.shape[0] * int(problem.base.max()) > 20_000:
        return
    error = (
        (
            problem.run(out).double()
            - tree_attention_reference(problem.query, problem.kv_cache, problem.meta, problem.scale)
        )
        .abs()
        .max()
    )
    if not error < 2e-2:
        raise SystemExit(f"wrong result, error {error}: nothing was timed")


def layer_table(dtypes: list[str], heads: tuple[int, int], dim: int) -> None:
    """Print one row per shape: plan, layer, stock kernel."""
    print("| dtype | nodes | context | batch | groups | plan us | layer us | causal kernel us |")
    print("|---|---|---|---|---|---|---|---|")
    for name, nodes, context, batch in itertools.product(
        dtypes, (1, 8, 16, 64), (64, 512, 2048), (1, 8, 32)
    ):
        problem = make_problem(nodes, context, batch, DTYPES[name], heads, dim)
        out = torch.empty_like(problem.query)
        check(problem, out)
        layer = least_time(lambda p=problem, o=out: p.run(o))  # type: ignore[misc]
        layout = problem.meta.layout
        plan = least_time(
            lambda p=problem, y=layout: build_metadata(  # type: ignore[misc]
                p.tree, p.base, p.block_table, y, heads[0]
            ),
            0.03,
        )
        stock = causal_kernel(problem)
        causal = f"{least_time(lambda s=stock, o=out: s(o)):.0f}" if stock else "-"  # type: ignore[misc]
        print(
            f"| {name} | {nodes} | {context} | {batch} | {len(problem.meta.groups)} "
            f"| {plan:.0f} | {layer:.0f} | {causal} |",
            flush=True,
        )


def strategy_table(heads: tuple[int, int], dim: int) -> None:
    """Print the ways to group requests and to compute the products, for one layer."""
    print("| dtype | nodes | context | batch | one by one us | all padded us | as planned us |")
    print("|---|---|---|---|---|---|---|")
    cost, limit = grouping.GROUP_COST, grouping.GROUP_LIMIT
    for name, nodes, context, batch in itertools.product(
        ("bf16", "fp32"), (8, 16, 64), (64, 512, 2048), (8, 32)
    ):
        times = []
        for setting in ((-1, 0), (1 << 60, 1 << 60), (cost, limit)):
            grouping.GROUP_COST, grouping.GROUP_LIMIT = setting
            problem = make_problem(nodes, context, batch, DTYPES[name], heads, dim)
            out = torch.empty_like(problem.query)
            times.append(least_time(lambda p=problem, o=out: p.run(o)))  # type: ignore[misc]
        grouping.GROUP_COST, grouping.GROUP_LIMIT = cost, limit
        cells = " | ".join(f"{t:.0f}" for t in times)
        print(f"| {name} | {nodes} | {context} | {batch} | {cells} |", flush=True)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description="Time tree attention on the CPU.")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp32"])
    parser.add_argument("--heads", type=int, nargs=2, default=(14, 2), help="query and key heads")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--strategies", action="store_true", help="compare ways to batch instead")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    print(
        f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{args.heads[0]}/{args.heads[1]} heads of {args.head_size}\n"
    )
    heads = (args.heads[0], args.heads[1])
    if args.strategies:
        strategy_table(heads, args.head_size)
    else:
        layer_table(args.dtypes, heads, args.head_size)


if __name__ == "__main__":
    main()
