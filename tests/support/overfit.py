"""A tiny target that generates one text, and heads that memorize it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_medusa.offline.records import Record
from vllm_medusa.training.draft_vocab import count_tokens, frequent_tokens
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.loop import Loop
from vllm_medusa.training.medusa1 import PIECE_ROWS, Medusa1, new_heads
from vllm_medusa.training.method import Data, Setup
from vllm_medusa.training.options import HeadOptions, StepOptions
from vllm_medusa.training.rows import Texts
from vllm_medusa.training.run import Stage, TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers

PROMPT = [5, 9, 30, 77]
K = 3
OVERFIT = StepOptions(
    labels="tokens",
    epochs=400,
    batch_tokens=48,
    learning_rate=2e-2,
    warmup_steps=10,
    measure_every=10_000,
)


@torch.no_grad()
def greedy_record(target: Target, count: int = 48, index: int = 0) -> Record:
    """The target's continuation of `PROMPT` at temperature 0."""
    ids = list(PROMPT)
    ids[0] += index
    for _ in range(count):
        states = target.hidden_states(torch.tensor([ids]))
        ids.append(int(target.lm_head(states[0, -1]).argmax()))
    return Record(index, index + 1, str(index), tuple(ids), ((len(PROMPT), len(ids)),), 0.0)


def cut(target: Target, records: list[Record], size: int, max_bytes: int = 1 << 30) -> Data:
    """Pieces of texts with states in memory."""
    texts = Texts(records)
    pieces = texts.cut(size)
    states = HiddenStates(target, texts, pieces, dtype=torch.float32, max_bytes=max_bytes)
    states.build()
    return Data(texts, pieces, states)


def looped(
    target: Target,
    records: list[Record],
    run: TrainingRun,
    settings: StepOptions = OVERFIT,
    *,
    heads: Any = None,
    cached: bool = True,
    **options: Any,
) -> Loop:
    """A training loop with cached states, evaluated on its own training text."""
    run.work.mkdir(exist_ok=True)
    size = min(PIECE_ROWS, settings.batch_tokens or PIECE_ROWS)
    train = cut(target, records, size, 1 << 30 if cached else 0)
    heads = heads or new_heads(target, HeadOptions(num_heads=K))
    setup = Setup(train, cut(target, records, 32), settings, Workers("cpu"))
    return Loop(Medusa1(target, heads, setup), Stage(run), **options)


def overfit(target: Target, folder: Path, draft_vocab: int | None = None) -> tuple[Record, Loop]:
    """Heads trained on the target's one text; with a draft vocabulary of a given size."""
    record, some = greedy_record(target), None
    if draft_vocab is not None:
        some = frequent_tokens(count_tokens([record], target.vocab_size), draft_vocab)
    with TrainingRun(folder, {}) as run:
        made = looped(
            target, [record], run, heads=new_heads(target, HeadOptions(num_heads=K), some)
        )
        made.train()
    return record, made
