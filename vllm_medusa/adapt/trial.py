"""The stage that measures this machine: the real training, a few steps of it, on random text."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

from vllm_medusa.adapt.amounts import Rates
from vllm_medusa.files import write_json
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import Record, write_records
from vllm_medusa.options import Options, Positive, group, option
from vllm_medusa.training.job import target_dtype
from vllm_medusa.training.options import JointOptions, TrainOptions
from vllm_medusa.training.target import Target
from vllm_medusa.training.train import train
from vllm_medusa.training.workers import Workers

RATES = "rates.json"
_STEPS = 5
_MOST_ROWS = 512  # of a step; more of them take as long each
_PROMPT_TOKENS, _ANSWER_TOKENS = 16, 256
_TOKENS = 8000  # different ones, as texts have: heads may be for these alone


class TrialOptions(Options):
    """Options of `try_machine`."""

    training: TrainOptions = group()  # whose output stands in the folder for all files
    batch: Positive = option("texts that the target will write at a time")
    rows: Positive = option("of a step")


def try_machine(options: TrialOptions, progress: Progress = SILENT) -> None:
    """Time the target and a few steps, and write the rates beside the output."""
    training, output = options.training, options.training.files.output
    folder, rows = output.parent, min(options.rows, _MOST_ROWS)
    shutil.rmtree(output, ignore_errors=True)  # of a trial that was killed
    prefill, step, vocab = _time_target(training, options.batch)
    data, heldout = folder / "random.jsonl", folder / "heldout.jsonl"
    _write_random(data, vocab, -(-rows * _STEPS // _ANSWER_TOKENS), seed=0)
    _write_random(heldout, vocab, 1, seed=1)
    clock = _Clock(progress)
    train(
        replace(
            training,
            method="medusa-1",
            joint=JointOptions(),
            files=replace(training.files, data=data, heldout=heldout),
            training=replace(training.training, epochs=1, batch_tokens=rows),
        ),
        clock,
    )
    rates = Rates(prefill, step, options.batch, rows * clock.steps_a_second())
    shutil.rmtree(output, ignore_errors=True)
    write_json(folder / RATES, rates.to_dict())


class _Clock(Progress):
    """Notes when each step ended."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._ends: list[tuple[float, float]] = []

    def at(self, what: str, done: float, total: float | None, text: str = "") -> None:
        if what == "training" and (not self._ends or done > self._ends[-1][1]):
            self._ends.append((time.perf_counter(), done))
        self._progress.at(f"trial, {what}", done, total)

    def steps_a_second(self) -> float:
        """Without the first, which warms up."""
        (began, first), (ended, last) = self._ends[0], self._ends[-1]
        return (last - first) / (ended - began)


def _time_target(training: TrainOptions, batch: int) -> tuple[float, float, int]:
    """Tokens a second of whole texts, seconds of a step of ``batch`` texts, and the vocabulary."""
    machine = training.machine
    device = Workers(machine.device).device
    target = Target.load(
        training.model,
        dtype=target_dtype(machine.dtype, None, device),
        device=device,
        quantization=machine.quantization,
    )

    def seconds(ids: torch.Tensor, *, head: bool) -> float:
        for _ in range(2):  # the first warms up
            start = time.perf_counter()
            states = target.hidden_states(ids.to(target.device))
            if head:
                states = target.lm_head(states)
            states.sum().item()  # waits for a GPU
        return time.perf_counter() - start

    with torch.inference_mode():
        texts = torch.randint(target.vocab_size, (4, 256))
        prefill = texts.numel() / seconds(texts, head=False)
        step = seconds(torch.randint(target.vocab_size, (batch, 1)), head=True)
    return prefill, step, target.vocab_size


def _write_random(path: Path, vocab: int, count: int, seed: int) -> None:
    draw = random.Random(seed)
    prompt, size = _PROMPT_TOKENS, _PROMPT_TOKENS + _ANSWER_TOKENS
    write_records(
        path,
        (
            Record(
                index=index,
                line=index + 1,
                request_id=str(index),
                token_ids=tuple(draw.choices(range(min(vocab, _TOKENS)), k=size)),
                generated=((prompt, size),),
                temperature=1.0,
            )
            for index in range(count)
        ),
    )
