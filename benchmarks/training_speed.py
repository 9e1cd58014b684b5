"""Training speed of Medusa-1: hidden states cached, against a backbone pass in every step.

Three arms train the same heads on the same records with the same optimiser, each in a process of
its own; they take turns, some steps each, so that other work on the machine slows all of them:

- ``reference``: the published recipe. The backbone runs over the step's whole texts, all heads'
  logits [T, K, V] exist at once, autograd goes back through them;
- ``chunked``: the backbone in every step, our losses (`vllm_medusa.training.losses`);
- ``cached``: our losses on states computed once (`vllm_medusa.training.hidden_cache`).

First all arms have to find the same losses of the same heads (the gate). Speed counts positions
with a label; memory is each process's peak resident set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import describe_machine, write_json
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import new_heads
from vllm_medusa.training.losses import IGNORED, head_labels, label_mask
from vllm_medusa.training.medusa1 import Medusa1, Recipe
from vllm_medusa.training.records import Record, load_records
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts
from vllm_medusa.training.workers import Workers

ARMS = ("reference", "chunked", "cached")
TOLERANCE = 2e-2  # of a mean loss; bf16 products, other batches


class Reference:
    """Steps as the reference implementation takes them; loss weights are ours."""

    def __init__(self, trainer: Medusa1, records: list[Record]) -> None:
        self.trainer, self.records = trainer, records

    def losses(self, records: list[Record]) -> tuple[Tensor, int]:
        """Mean loss of each head [K], and how many positions have a label."""
        trainer = self.trainer
        heads, target = trainer.heads, trainer.target
        length = max(len(record.token_ids) for record in records)
        ids = torch.zeros(len(records), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        labels = torch.full((len(records), length, heads.num_heads), IGNORED)
        for row, record in enumerate(records):
            text, size = torch.tensor(record.token_ids), len(record.token_ids)
            ids[row, :size], mask[row, :size] = text, 1
            counted = label_mask(record.generated, size, heads.num_heads)
            labels[row, :size] = head_labels(text, counted)
        with torch.no_grad():
            states = target.hidden_states(ids, mask).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.recipe.bf16):
            x = heads(states.flatten(0, 1))  # [T, K, H]
            logits = trainer.lm_head(x.flatten(0, 1)).unflatten(0, x.shape[:2]).float()
            flat = labels.flatten(0, 1)
            each = [
                F.cross_entropy(logits[:, k], flat[:, k], ignore_index=IGNORED)
                for k in range(heads.num_heads)
            ]
        return torch.stack(each), int((flat[:, 0] != IGNORED).sum())

    def step(self, number: int) -> int:
        """One step of the optimiser on the records that step `number` of the order names."""
        trainer = self.trainer
        trainer.optimizer.zero_grad(set_to_none=True)
        count = max(1, trainer.recipe.batch_rows // max(1, _labels(self.records)))
        first = number * count % len(self.records)
        losses, rows = self.losses((self.records * 2)[first : first + count])
        (losses * trainer.decay).sum().backward()
        torch.nn.utils.clip_grad_norm_(trainer.heads.parameters(), 1.0)
        trainer.optimizer.step()
        return rows


def _labels(records: list[Record]) -> int:
    """Labelled positions of an average record."""
    return sum(r.num_generated - len(r.generated) for r in records) // len(records)


def arm(name: str, args: argparse.Namespace, link: Connection) -> None:
    """Serve one arm: answers "gate" with losses and any number with (seconds, positions)."""
    torch.set_num_threads(args.threads)
    records, _ = load_records(args.records)
    records = records[: args.limit]
    target = Target.load(args.target, dtype=getattr(torch, args.dtype))
    recipe = Recipe(labels="tokens", epochs=10_000, batch_rows=args.batch, bf16=args.bf16)
    with tempfile.TemporaryDirectory() as folder, TrainingRun(Path(folder) / "run", {}) as run:
        states = HiddenStates(
            target,
            Texts.of(records),
            run.work,
            {},
            dtype=getattr(torch, args.dtype),
            max_bytes=1 << 40 if name == "cached" else 0,
        )
        start = time.perf_counter()
        states.build()
        built = time.perf_counter() - start
        heads = new_heads(target, args.num_heads, args.num_layers)
        trainer = Medusa1(target, heads, states, None, recipe, run, Workers("cpu"))
        reference = Reference(trainer, records)
        if name == "cached":  # training needs the LM head only
            target.backbone = None
            target.model = None  # type: ignore[assignment]
        step: Callable[[int], int] = reference.step
        if name != "reference":
            step = lambda number: _our_step(trainer, number)  # noqa: E731
        done = 0
        link.send({"built": built, "bytes": states.cached_bytes})
        while (order := link.recv()) is not None:
            if order == "gate":
                link.send(_gate(name, trainer, reference, records))
                continue
            start, rows = time.perf_counter(), 0
            for _ in range(order):
                rows += step(done)
                done += 1
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            link.send((seconds, rows, peak))
        shutil.rmtree(states.folder, ignore_errors=True)


def _our_step(trainer: Medusa1, number: int) -> int:
    trainer.step = number
    return int(trainer._one_step()["rows"])


def _gate(name: str, trainer: Medusa1, reference: Reference, records: list[Record]) -> list[float]:
    """Mean losses of the untrained heads on the first records."""
    some = records[:4]
    with torch.no_grad():
        if name == "reference":
            return [float(x) for x in reference.losses(some)[0]]
        texts = trainer.train_states.texts
        pieces = [p for p in trainer.pieces if texts.record_of(p) < len(some)]
        ones = torch.ones(trainer.heads.num_heads)
        sums = _sums(trainer, pieces, ones)
        return [float(x) for x in sums / trainer._label_counts(pieces)]


def _sums(trainer: Medusa1, pieces: list[Any], ones: Tensor) -> Tensor:
    with torch.enable_grad():
        return trainer._backward(pieces, ones)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all arms in turns.

    Raises:
        SystemExit: the gate is red.

    """
    context = multiprocessing.get_context("spawn")
    links, processes = {}, []
    for name in ARMS:
        links[name], theirs = context.Pipe()
        processes.append(context.Process(target=arm, args=(name, args, theirs), daemon=True))
        processes[-1].start()
    ready = {name: link.recv() for name, link in links.items()}
    losses = {}
    for name, link in links.items():
        link.send("gate")
        losses[name] = link.recv()
    worst = max(
        abs(a - b) for arm in ARMS for a, b in zip(losses[arm], losses[ARMS[0]], strict=True)
    )
    if worst > TOLERANCE * max(losses[ARMS[0]]):
        raise SystemExit(f"the arms' losses differ by {worst:.3g}: {losses}")
    rounds: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ARMS}
    for turn in range(args.rounds + 1):
        for name, link in links.items():
            link.send(args.steps)
            found = link.recv()
            if turn:  # the first turn warms up
                rounds[name].append(found)
    for link in links.values():
        link.send(None)
    for process in processes:
        process.join(60)
    rates = {name: [rows / seconds for seconds, rows, _ in found] for name, found in rounds.items()}
    rows = []
    for name in ARMS:
        ratios = [a / b for a, b in zip(rates[name], rates["reference"], strict=True)]
        rows.append(
            {
                "arm": name,
                "ratio": round(statistics.median(ratios), 2),
                "min": round(min(ratios), 2),
                "max": round(max(ratios), 2),
                "peak_gb": round(max(peak for _, _, peak in rounds[name]) / 1e9, 2),
            }
        )
    per_token = statistics.median(1 / rate for rate in rates["reference"])
    return {
        "machine": describe_machine(),
        "setting": {k: str(v) for k, v in vars(args).items() if k != "output"},
        "gate": {"largest_difference_of_a_loss": worst},
        "cache": {
            "gb": ready["cached"]["bytes"] / 1e9,
            "in_reference_positions": round(ready["cached"]["built"] / per_token),
        },
        "rows": rows,
    }


def table(document: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| arm | tokens a second / reference's (median, smallest, largest) | peak memory, GB |",
        "|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['arm']} | **{row['ratio']:.2f}** ({row['min']:.2f}-{row['max']:.2f}) "
            f"| {row['peak_gb']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("records", type=Path, help="of `vllm-medusa distill`")
    parser.add_argument("--limit", type=int, default=64, help="records (64)")
    parser.add_argument("--batch", type=int, default=768, help="labelled positions a step (768)")
    parser.add_argument("--num-heads", type=int, default=5)
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="a turn (3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--bf16", action="store_true", help="heads compute in bfloat16")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    document = measure(args)
    if args.output is not None:
        write_json(args.output, document)
    print(json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1))
    print(table(document))


if __name__ == "__main__":
    main()
