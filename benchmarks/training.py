"""Training speed of Medusa-1: hidden states cached, against a backbone pass in every step.

Three arms train the same heads on the same records with the same optimiser, each in a process of
its own; they take turns, some steps each, so that other work on the machine slows all of them:

- ``reference``: the published recipe. The backbone runs over the step's whole texts, all heads'
  logits [T, K, V] exist at once, autograd goes back through them;
- ``chunked``: the backbone in every step, our losses (`vllm_medusa.training.losses`);
- ``cached``: our losses on states computed once (`vllm_medusa.training.hidden_cache`).

First all arms have to find the same losses of the same heads. Speed counts positions with a label;
memory is each process's peak resident set. The records are of `vllm-medusa distill`.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Row
from vllm_medusa.job import Progress
from vllm_medusa.offline.records import Record, load_records
from vllm_medusa.options import FromZero, Options, Positive, option
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.loop import Loop
from vllm_medusa.training.losses import IGNORED, LMHead, head_labels
from vllm_medusa.training.medusa1 import PIECE_ROWS, Medusa1, new_heads
from vllm_medusa.training.method import Texts
from vllm_medusa.training.options import StepOptions
from vllm_medusa.training.rows import cut_pieces
from vllm_medusa.training.run import Run, Stage
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers

ARMS = ("reference", "chunked", "cached")
TOLERANCE = 2e-2  # of a mean loss; bf16 products, other batches


class TrainingOptions(Options):
    """What is trained."""

    target: Path = option("folder of the target", positional=True)
    records: Path = option("of `vllm-medusa distill`", positional=True)
    limit: Positive = option("records", default=64)
    batch: Positive = option("labelled positions a step", default=768)
    num_heads: Positive = option(default=5)
    num_layers: FromZero = option(default=1)
    steps: Positive = option("of each turn", default=3)
    rounds: Positive = option("turns, after one to warm up", default=5)
    threads: Positive = option(default=1)
    dtype: Literal["float32", "bfloat16"] = option("of the backbone", default="float32")
    bf16: bool = option("heads compute in bfloat16", default=False)


class Reference:
    """Steps as the reference implementation takes them; loss weights are ours."""

    def __init__(self, loop: Loop, target: Target, lm_head: LMHead, records: list[Record]) -> None:
        self.loop, self.target, self.lm_head, self.records = loop, target, lm_head, records

    def losses(self, records: list[Record]) -> tuple[Tensor, int]:
        """Mean loss of each head [K], and how many positions have a label."""
        heads, target = self.loop.method.heads, self.target
        length = max(len(record.token_ids) for record in records)
        ids = torch.zeros(len(records), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        labels = torch.full((len(records), length, heads.num_heads), IGNORED)
        for row, record in enumerate(records):
            text, size = torch.tensor(record.token_ids), len(record.token_ids)
            ids[row, :size], mask[row, :size] = text, 1
            labels[row, :size] = head_labels(text, record.generated, heads.num_heads)
        with torch.no_grad():
            states = target.hidden_states(ids, mask).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.loop.method.bf16):
            x = heads(states.flatten(0, 1))  # [T, K, H]
            logits = self.lm_head(x.flatten(0, 1)).unflatten(0, x.shape[:2]).float()
            flat = labels.flatten(0, 1)
            each = [
                F.cross_entropy(logits[:, k], flat[:, k], ignore_index=IGNORED)
                for k in range(heads.num_heads)
            ]
        return torch.stack(each), int((flat[:, 0] != IGNORED).sum())

    def step(self, number: int) -> int:
        """One step of the optimiser on the records that step `number` of the order names."""
        method, optimizer = self.loop.method, self.loop.optimizer
        optimizer.zero_grad(set_to_none=True)
        count = max(1, (method.settings.batch_tokens or 0) // max(1, _labels(self.records)))
        first = number * count % len(self.records)
        losses, rows = self.losses((self.records * 2)[first : first + count])
        (losses * method.decay).sum().backward()
        torch.nn.utils.clip_grad_norm_(method.heads.parameters(), 1.0)
        optimizer.step()
        return rows


def _labels(records: list[Record]) -> int:
    """Labelled positions of an average record."""
    return sum(r.num_generated - len(r.generated) for r in records) // len(records)


def arm(name: str, options: TrainingOptions, link: Connection) -> None:
    """Serve one arm: answers "gate" with losses and any number with (seconds, positions)."""
    torch.set_num_threads(options.threads)
    records, _ = load_records(options.records)
    records = records[: options.limit]
    target = Target.load(options.target, dtype=getattr(torch, options.dtype))
    settings = StepOptions(
        labels="tokens", epochs=100, batch_tokens=options.batch, learning_rate=1e-3, warmup_steps=50
    )
    with tempfile.TemporaryDirectory() as folder, Run(Path(folder) / "run", {}) as run:
        run.begin()
        pieces = cut_pieces(records, PIECE_ROWS)
        states = HiddenStates(
            target,
            records,
            [(0, len(record.token_ids) - 1) for record in records],
            run.work,
            dtype=getattr(torch, options.dtype),
            max_bytes=1 << 40 if name == "cached" else 0,
        )
        start = time.perf_counter()
        states.build()
        built = time.perf_counter() - start
        heads = new_heads(target, options.num_heads, options.num_layers)
        texts = Texts(records, pieces, states)
        method = Medusa1(target, heads, texts, None, settings, Workers("cpu"), bf16=options.bf16)
        loop = Loop(method, Stage(run))
        reference = Reference(loop, target, method.lm_head, records)
        if name == "cached":  # training needs the LM head only
            target.backbone = None
            target.model = None  # type: ignore[assignment]
        step: Callable[[int], int] = reference.step
        if name != "reference":
            step = lambda number: _our_step(loop, number)  # noqa: E731
        done = 0
        link.send({"built": built, "bytes": states.cached_bytes})
        while (order := link.recv()) is not None:
            if order == "gate":
                link.send(_gate(name, method, reference, records))
                continue
            start, rows = time.perf_counter(), 0
            for _ in range(order):
                rows += step(done)
                done += 1
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            link.send((seconds, rows, peak))


def _our_step(loop: Loop, number: int) -> int:
    loop.step = number % loop.steps
    return int(loop._one_step()["rows"])


def _gate(name: str, method: Medusa1, reference: Reference, records: list[Record]) -> list[float]:
    """Mean losses of the untrained heads on the first records."""
    some = records[:4]
    with torch.no_grad():
        if name == "reference":
            return [float(x) for x in reference.losses(some)[0]]
        pieces = method.texts.pieces
        batch = method.collate([i for i, piece in enumerate(pieces) if piece.record < len(some)])
        sums = method.loss(batch, torch.ones(method.heads.num_heads))[1]
        return [float(x) for x in sums / batch.counts]


def run(options: TrainingOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm; all in turns."""
    context = multiprocessing.get_context("spawn")
    links, processes = {}, []
    for name in ARMS:
        links[name], theirs = context.Pipe()
        processes.append(context.Process(target=arm, args=(name, options, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # so that an arm that ends is noticed
    try:
        ready = {name: _receive(name, link) for name, link in links.items()}
        losses = {name: _ask(name, link, "gate") for name, link in links.items()}
        found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in ARMS}
        for turn in range(options.rounds + 1):
            progress.note(f"turn {turn} of {options.rounds}")
            for name, link in links.items():
                found[name].append(_ask(name, link, options.steps))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    del ready["reference"], ready["chunked"]
    rates = {n: [rows / seconds for seconds, rows, _ in each[1:]] for n, each in found.items()}
    for name in ARMS:
        ratios = [a / b for a, b in zip(rates[name], rates["reference"], strict=True)]
        error = max(abs(a - b) for a, b in zip(losses[name], losses["reference"], strict=True))
        right = error <= TOLERANCE * max(losses["reference"])
        numbers = {
            "ratio": statistics.median(ratios),
            "least_and_most": [min(ratios), max(ratios)],
            "peak_gb": max(peak for _, _, peak in found[name]) / 1e9,
            "loss_off": error,
        }
        if name == "cached":
            built = ready[name]["built"] * statistics.median(rates["reference"])
            numbers |= {"cache_gb": ready[name]["bytes"] / 1e9, "cache_positions": round(built)}
        wrong = f"its losses differ from the reference's by {error:.3g}"
        yield Row({"name": name}, numbers, right, "" if right else wrong)


def _ask(name: str, link: Connection, order: Any) -> Any:
    link.send(order)
    return _receive(name, link)


def _receive(name: str, link: Connection) -> Any:
    try:
        return link.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} ended; its error stands above") from None


CASE = Case(
    TrainingOptions,
    run,
    {
        "name": ("arm", ""),
        "ratio": ("tokens a second to the reference's", ".2f"),
        "least_and_most": ("least, most", ".2f"),
        "peak_gb": ("peak memory, GB", ".2f"),
        "cache_gb": ("cache, GB", ".4f"),
        "cache_positions": ("built in the time of so many reference positions", ""),
    },
    quick={"limit": 24, "steps": 1, "rounds": 3, "batch": 512},
)
