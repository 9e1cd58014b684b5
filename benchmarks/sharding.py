"""LM heads whole on every tensor-parallel rank, or cut over the vocabulary: time one draft step.

    OMP_NUM_THREADS=1 python -m benchmarks sharding

Two real processes with gloo between them. A step turns the heads' hidden states into the best ten
tokens of each head; the residual layers before it are the same either way and left out. Arms:

    replicated   each rank multiplies all rows and ranks all ids; nothing travels
    split        each rank takes half the rows, ranks its half, and the ranks exchange their ten
                 best per head (`vllm_medusa.proposer.sharded`): what the worker chooses
    gathered     half the rows, but all logits travel: what vLLM does with its own LM head, and we
                 with heads that score some tokens with the target's

for heads with LM heads of their own (v1 checkpoints: a matrix each) and heads that share the
target's (v2: one matrix, a row for each head). Rounds of all arms alternate; a round lasts until
the slower rank is done, and ratios are those of neighbours in time. All ranks and arms have to
agree on the tokens, up to rounding.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Row
from vllm_medusa.job import Progress
from vllm_medusa.options import Above, Options, Positive, option
from vllm_medusa.proposer.sharded import VocabShard, local_topk, logit_values, merge_topk, token_ids
from vllm_medusa.proposer.topk import ranked, stable_topk

RANKS = 2
HEADS = 4
WIDTH = 10  # best tokens of each head
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Linear = Callable[[Tensor], Tensor]  # [T, H] -> [T, V]
AllGather = Callable[[Tensor], Tensor]  # [...] of this rank -> [R, ...]
Arm = Callable[[Tensor], Tensor]  # hidden states [B, K, H] -> keys int64 [B, K, WIDTH]


@dataclass(frozen=True)
class Shape:
    """Of the LM heads."""

    kind: str  # "own" or "shared"
    vocab: int
    hidden: int
    dtype: str

    def num_bytes(self) -> int:
        """Of all ranks' weights, whole and halved."""
        matrices = HEADS if self.kind == "own" else 1
        size = matrices * self.vocab * self.hidden * DTYPES[self.dtype].itemsize
        return RANKS * size + size


def make_arms(
    shape: Shape, whole: list[Linear], part: list[Linear], shard: VocabShard, gather: AllGather
) -> dict[str, Arm]:
    """The arms of one rank; ``whole`` and ``part`` are its products, one for each matrix."""
    ids = torch.arange(shape.vocab)

    def keys_of(logits: Tensor) -> Tensor:
        best = stable_topk(logits, WIDTH)
        return ranked(logits.gather(-1, best), ids[best])

    def replicated(x: Tensor) -> Tensor:
        return keys_of(multiply(whole, x))

    def split(x: Tensor) -> Tensor:
        return merge_topk(gather(local_topk(multiply(part, x), WIDTH, shard)), WIDTH)

    def gathered(x: Tensor) -> Tensor:
        logits = gather(multiply(part, x)).movedim(0, -2).flatten(-2)
        return keys_of(logits[..., : shape.vocab])

    return {"replicated": replicated, "split": split, "gathered": gathered}


def multiply(linears: Sequence[Linear], x: Tensor) -> Tensor:
    """Logits [B, K, V] of hidden states [B, K, H]."""
    if len(linears) == 1:
        return linears[0](x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return torch.stack([linear(x[:, head]) for head, linear in enumerate(linears)], 1)


def disagreement(keys: dict[str, Tensor]) -> float:
    """The largest distance between two arms' logits of the same place, of all logits' spread."""
    values = torch.stack([logit_values(each) for each in keys.values()])
    spread = float(values.max() - values.min())
    return float((values.amax(0) - values.amin(0)).max()) / max(spread, 1e-9)


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in ms, and of each arm's ratio to the replicated one the median and quartiles.

    ``seconds`` are the rounds of each arm, in the order they were run.
    """
    base = seconds["replicated"]
    result: dict[str, Any] = {"rounds": len(base)}
    for arm, times in seconds.items():
        result[f"{arm}_ms"] = 1e3 * statistics.median(times)
        if arm != "replicated":
            ratios = [mine / theirs for mine, theirs in zip(times, base, strict=True)]
            result[f"{arm}_ratio"] = statistics.median(ratios)
            result[f"{arm}_quartiles"] = statistics.quantiles(ratios, n=4)[::2]
    return result


def packed_product() -> tuple[str, Callable[[Tensor], Linear]]:
    """The product that the worker uses on this machine."""
    try:
        from vllm.platforms import current_platform

        from vllm_medusa.worker import compat

        current_platform.import_kernels()
    except ImportError:
        return "torch", lambda weight: lambda x: F.linear(x, weight)
    return "vLLM's (oneDNN, packed)", lambda weight: compat.packed_linear(weight, None)


def all_gather(x: Tensor) -> Tensor:
    """Through gloo, as bytes."""
    own = x.contiguous().view(torch.uint8)
    parts = own.new_empty((RANKS, *own.shape))
    dist.all_gather(list(parts.unbind()), own)
    return parts.view(x.dtype)


def slowest(seconds: float) -> float:
    """The most of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


class ShardingOptions(Options):
    """Which shapes."""

    dtypes: tuple[Literal["bf16", "fp32"], ...] = option(default=("bf16",))
    vocabs: tuple[Positive, ...] = option(default=(32_000, 152_000))
    hidden: tuple[Positive, ...] = option(default=(1024, 2048, 4096))
    batches: tuple[Positive, ...] = option(default=(1, 8, 32))
    memory_gb: Above = option("for the weights of all ranks", default=4.0)
    seconds: Above = option("for each row", default=3.0)


def run(options: ShardingOptions, progress: Progress) -> Iterator[Row]:
    """A row for each shape and batch, from rank 0 as it finds them."""
    context = multiprocessing.get_context("spawn")
    rows = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options, rows)
        ranks = torch.multiprocessing.spawn(rank_main, arguments, nprocs=RANKS, join=False)
        while (row := _next(rows, ranks)) is not None:
            yield row
        while not ranks.join():
            pass


def _next(rows: Any, ranks: Any) -> Row | None:
    """The next row, None after the last; raises what a rank raised."""
    while rows.empty():
        ranks.join(timeout=0.2)
        if not any(process.is_alive() for process in ranks.processes) and rows.empty():
            return None
    row: Row | None = rows.get()
    return row


def rank_main(rank: int, folder: str, options: ShardingOptions, rows: Any) -> None:
    """One process; rank 0 tells what both found."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    product, make = packed_product()
    for shape in shapes(options):
        for row in measure(shape, rank, make, options):
            if rank == 0:
                rows.put(Row(row.what, {**row.numbers, "product": product}, row.right, row.failed))
    if rank == 0:
        rows.put(None)
    dist.barrier()
    dist.destroy_process_group()


def shapes(options: ShardingOptions) -> Iterator[Shape]:
    """Those that fit into the memory allowed, small ones first."""
    for dtype, kind, vocab, hidden in itertools.product(
        options.dtypes, ("own", "shared"), options.vocabs, options.hidden
    ):
        shape = Shape(kind, vocab, hidden, dtype)
        if shape.num_bytes() <= options.memory_gb * 2**30:
            yield shape


@torch.inference_mode()
def measure(
    shape: Shape, rank: int, make: Callable[[Tensor], Linear], options: ShardingOptions
) -> Iterator[Row]:
    """One row for each batch size."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[shape.dtype]
    shard = VocabShard.of_rank(rank, -(-shape.vocab // RANKS), shape.vocab)
    mine = slice(shard.first_id, shard.first_id + shard.num_ids)
    whole, part = [], []
    for _ in range(HEADS if shape.kind == "own" else 1):
        weight = torch.empty(shape.vocab, shape.hidden, dtype=dtype)
        weight.normal_(generator=generator)
        whole.append(make(weight))
        part.append(make(weight[mine].clone()))
    arms = make_arms(shape, whole, part, shard, all_gather)
    if shape.kind == "own":
        del arms["gathered"]
    for batch in options.batches:
        x = torch.randn(batch, HEADS, shape.hidden, generator=generator).to(dtype)
        name = f"{shape.kind} {shape.vocab}x{shape.hidden} {shape.dtype}, batch {batch}"
        what = {"name": name, **asdict(shape), "batch": batch}
        wrong = what_is_wrong(arms, x)
        yield Row(
            what,
            {} if wrong else summary(rounds(arms, x, options.seconds)),
            right=not wrong,
            failed=wrong,
        )


def what_is_wrong(arms: dict[str, Arm], x: Tensor) -> str:
    """How arms or ranks disagree, the same on all ranks; empty if they don't."""
    keys = {name: arm(x) for name, arm in arms.items()}
    if not torch.equal(*all_gather(token_ids(keys["split"]))):
        return "the ranks drafted different tokens"
    error = slowest(disagreement(keys))
    return "" if error < 1e-2 else f"the arms differ by {error} of the spread"


def rounds(arms: dict[str, Arm], x: Tensor, budget: float) -> dict[str, list[float]]:
    """Alternate the arms for about ``budget`` seconds; seconds of the slowest rank."""

    def once(arm: Arm) -> float:
        dist.barrier()
        start = time.perf_counter()
        arm(x)
        return slowest(time.perf_counter() - start)

    expected = sum(once(arm) for arm in arms.values())
    count = int(min(max(budget / expected, 9), 99))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(count):
        for name, arm in arms.items():
            seconds[name].append(once(arm))
    return seconds


CASE = Case(
    ShardingOptions,
    run,
    {
        "dtype": ("dtype", ""),
        "kind": ("LM heads", ""),
        "vocab": ("vocabulary", ""),
        "hidden": ("hidden", ""),
        "batch": ("batch", ""),
        "rounds": ("rounds", ""),
        "replicated_ms": ("replicated ms", ".2f"),
        "split_ms": ("split ms", ".2f"),
        "split_ratio": ("split/replicated", ".2f"),
        "split_quartiles": ("quartiles", ".2f"),
        "gathered_ratio": ("gathered/replicated", ".2f"),
    },
    quick={"vocabs": (32_000,), "hidden": (1024,), "seconds": 1.0},
)
