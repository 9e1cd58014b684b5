"""A step that mixes trees with prefill: what admitting a prompt costs the requests under way.

Beside it the same trees and the same chunk alone, of which the step should cost about the sum, and
torch's FlashAttention on the chunk (causal, contiguous).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.attention_checks import judge
from benchmarks.gpu.cases import Case, Lab, Record
from benchmarks.gpu.problems import Problem, Request, Shape, random_problem
from vllm_medusa.scorer.paged import paged_tree_attention


@dataclass(frozen=True)
class Mixed:
    """``trees`` requests of ``nodes`` rows behind ``context`` tokens; ``chunk`` rows of a prompt.

    Its rows alone fill the device: the keys go in one part.
    """

    layout: str
    heads: int
    kv_heads: int
    trees: int = 16
    context: int = 1024
    nodes: int = 64
    chunk: int = 2048
    head_size: int = 128

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return (
            f"{self.layout}, batch {self.trees}, context {self.context}, {self.nodes} nodes beside "
            f"a chunk of {self.chunk}"
        )

    @property
    def shape(self) -> Shape:
        """Trees first."""
        trees = (Request(self.nodes, self.context, is_tree=True),) * self.trees
        requests = (*trees, Request(self.chunk))
        return Shape(requests, self.heads, self.kv_heads, self.head_size)

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values, in bf16."""
        tokens = self.trees * (self.context + self.nodes) + self.chunk
        return 4 * tokens * self.kv_heads * self.head_size

    @property
    def flop(self) -> int:
        """Operations of both products; half of the chunk's square is not seen."""
        pairs = self.trees * self.nodes * (self.context + self.nodes) + self.chunk**2 // 2
        return 4 * pairs * self.heads * self.head_size

    def case(self) -> Case:
        """It as a case of the part ``speed``."""
        return Case(self.name, partial(measure, self), partial(launch, self))


def launch(mixed: Mixed) -> None:
    """What a step compiles."""
    problem = random_problem(mixed.shape, 0, "cpu")
    _attend(problem, problem.outputs()[0])


def measure(mixed: Mixed, lab: Lab) -> Record:
    """Check it against the reference, then time it whole and in its two halves."""
    from benchmarks.gpu.kernel_speed import timed

    whole = random_problem(mixed.shape, 0, lab.device)
    out, lse = whole.outputs()
    whole.call(paged_tree_attention, out, lse)
    record = judge(whole, out, lse, lab)
    bandwidth = lab.machine.get("copy_bytes_per_s")
    rate = lab.machine.get("matmul_flop_per_s")
    rows = mixed.trees * mixed.nodes
    record |= {
        "layout": mixed.layout,
        "heads": mixed.heads,
        "kv_heads": mixed.kv_heads,
        "batch": mixed.trees,
        "context": mixed.context,
        "nodes": f"{mixed.nodes}, chunk {mixed.chunk}",  # no line of the plot
        "planned": 0,
        "cache": "bfloat16",
        "splits": 1,
        "floor_us": mixed.kv_bytes / bandwidth * 1e6 if bandwidth else None,
        "arithmetic_us": mixed.flop / rate * 1e6 if rate else None,
    }
    trees = _part(whole, slice(0, rows), slice(0, mixed.trees))
    chunk = _part(whole, slice(rows, rows + mixed.chunk), slice(mixed.trees, mixed.trees + 1))
    calls = 3 if lab.device == "cuda" else 1
    for name, problem in (("ours", whole), ("trees", trees), ("chunk", chunk)):
        record |= timed(name, partial(_attend, problem, problem.outputs()[0]), 1, calls, lab)
    record["ours_eager_us"] = statistics.median(lab.clock.wall(partial(_attend, whole, out)))
    shape = (1, mixed.heads, mixed.chunk, mixed.head_size)
    query = torch.randn(shape, dtype=torch.bfloat16, device=lab.device)
    keys = query[:, : mixed.kv_heads].repeat_interleave(mixed.heads // mixed.kv_heads, 1)

    def flash(_: int) -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(query, keys, keys, is_causal=True)

    try:
        record |= timed("flash_chunk", flash, 1, calls, lab)
    except RuntimeError as reason:  # no such kernel here
        record["flash_chunk_reason"] = str(reason)[:200]
    return record


def _attend(problem: Problem, out: torch.Tensor, copy: int = 0) -> None:
    """The call as an engine makes it, without an LSE; there is one copy of the cache."""
    caches = (problem.key_cache, problem.value_cache)
    paged_tree_attention(problem.query, *caches, problem.batch, problem.scale, out=out)


def _part(problem: Problem, rows: slice, requests: slice) -> Problem:
    """Some of the requests, over the same cache."""
    batch = problem.batch
    cu = batch.cu_query_lens[requests.start : requests.stop + 1] - rows.start
    part = replace(
        batch,
        cu_query_lens=cu,
        seq_lens=batch.seq_lens[requests],
        block_table=batch.block_table[requests],
        is_tree=batch.is_tree[requests],
        ancestor_bits=batch.ancestor_bits[requests],
        depths=batch.depths[requests],
        max_query_len=int(cu.diff().max()),
    )
    count = rows.stop - rows.start
    return replace(problem, query=problem.query[rows], batch=part, rows=count)
