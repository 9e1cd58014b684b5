"""LM heads whole on every tensor-parallel rank, or cut over the vocabulary: time one draft step.

    OMP_NUM_THREADS=1 python -m benchmarks.heads_sharding --output benchmarks/results

Two real processes with gloo between them. A step turns the heads' hidden states into the best ten
tokens of each head; the residual layers before it are the same either way and left out. Arms:

    replicated   each rank multiplies all rows and ranks all ids; nothing travels
    split        each rank takes half the rows, ranks its half, and the ranks exchange their ten
                 best per head (`vllm_medusa.proposer.sharded`): what `worker/sharding.py` chooses
    gathered     half the rows, but all logits travel: what vLLM does with its own LM head, and we
                 with heads that score some tokens with the target's

for heads with LM heads of their own (v1 checkpoints: a matrix each) and heads that share the
target's (v2: one matrix, a row for each head). Rounds of all arms alternate; a round lasts until
the slower rank is done, and ratios are those of neighbours in time. Before anything is timed all
ranks and arms have to agree on the tokens, up to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import describe_machine, write_json
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
    """Of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def rank_main(rank: int, folder: str, args: argparse.Namespace) -> None:
    """One process; rank 0 prints and writes."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=RANKS)
    product, make = packed_product()
    rows = []
    for shape in shapes(args):
        for row in measure(shape, rank, make, args):
            rows.append(row)
            if rank == 0:
                print(line(row), flush=True)
    if rank == 0 and args.output is not None:
        machine = {**describe_machine(), "product": product, "load_at_end": os.getloadavg()}
        document = {"machine": machine, "ranks": RANKS, "heads": HEADS, "rows": rows}
        write_json(args.output / "heads_sharding.json", document)
    dist.destroy_process_group()


def shapes(args: argparse.Namespace) -> Iterator[Shape]:
    """Those that fit into the memory allowed, small ones first."""
    for dtype, kind, vocab, hidden in itertools.product(
        args.dtypes, ("own", "shared"), args.vocabs, args.hidden
    ):
        shape = Shape(kind, vocab, hidden, dtype)
        if shape.num_bytes() <= args.memory_gb * 2**30:
            yield shape


@torch.inference_mode()
def measure(
    shape: Shape, rank: int, make: Callable[[Tensor], Linear], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
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
    for batch in args.batches:
        x = torch.randn(batch, HEADS, shape.hidden, generator=generator).to(dtype)
        check(arms, x)
        yield {**asdict(shape), "batch": batch, **summary(rounds(arms, x, args.seconds))}


def check(arms: dict[str, Arm], x: Tensor) -> None:
    """Refuse to time arms or ranks that disagree."""
    keys = {name: arm(x) for name, arm in arms.items()}
    if not torch.equal(*all_gather(token_ids(keys["split"]))):
        raise SystemExit("the ranks drafted different tokens: nothing was timed")
    if not (error := disagreement(keys)) < 1e-2:
        raise SystemExit(f"the arms differ by {error} of the spread: nothing was timed")


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


HEADER = """\
| dtype | LM heads | vocabulary | hidden | batch | rounds | replicated ms | split ms \
| split/replicated (quartiles) | gathered/replicated |
|---|---|---|---|---|---|---|---|---|---|"""


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = row["split_quartiles"]
    gathered = f"{row['gathered_ratio']:.2f}" if "gathered_ratio" in row else "-"
    return (
        f"| {row['dtype']} | {row['kind']} | {row['vocab']} | {row['hidden']} | {row['batch']} "
        f"| {row['rounds']} | {row['replicated_ms']:.2f} | {row['split_ms']:.2f} "
        f"| {row['split_ratio']:.2f} ({low:.2f} to {high:.2f}) | {gathered} |"
    )


def main() -> None:
    """Parse the command line and run the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--vocabs", nargs="+", type=int, default=[32_000, 152_000])
    parser.add_argument("--hidden", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--memory-gb", type=float, default=4.0, help="for the weights of all ranks")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--output", type=Path, help="folder for heads_sharding.json")
    args = parser.parse_args()
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
