"""A tiny target that writes one text, and heads that learn it by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_medusa.offline.records import Record
from vllm_medusa.training.draft_vocab import count_tokens, frequent_tokens
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import new_heads
from vllm_medusa.training.medusa1 import Medusa1
from vllm_medusa.training.optimisation import Optimisation
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts
from vllm_medusa.training.workers import Workers

PROMPT = [5, 9, 30, 77]
K = 3
OVERFIT = Recipe(
    labels="tokens",
    epochs=400,
    batch_rows=48,
    optimisation=Optimisation(learning_rate=2e-2, warmup_steps=10),
    measure_every=10_000,
)


@torch.no_grad()
def greedy_record(target: Target, count: int = 48, index: int = 0) -> Record:
    """What the target writes behind `PROMPT` at temperature 0."""
    ids = list(PROMPT)
    ids[0] += index
    for _ in range(count):
        states = target.hidden_states(torch.tensor([ids]))
        ids.append(int(target.lm_head(states[0, -1]).argmax()))
    return Record(index, index + 1, str(index), tuple(ids), ((len(PROMPT), len(ids)),), 0.0)


def trainer(
    target: Target,
    records: list[Record],
    run: TrainingRun,
    recipe: Recipe = OVERFIT,
    *,
    heldout: list[Record] | None = None,
    heads: Any = None,
    cached: bool = True,
) -> Medusa1:
    """A trainer whose states are built, measuring on its own text unless told otherwise."""
    sources = []
    for part in (records, heldout or records):
        states = HiddenStates(
            target,
            Texts.of(part),
            run.work,
            {},
            dtype=torch.float32,
            max_bytes=1 << 30 if cached else 0,
        )
        states.build()
        sources.append(states)
    if heads is None:
        heads = new_heads(target, K, 1)
    return Medusa1(target, heads, *sources, recipe, run, Workers("cpu"))


def overfit(target: Target, folder: Path, draft_vocab: int | None = None) -> tuple[Record, Medusa1]:
    """Heads that know the target's one text, trained; with a draft vocabulary of so many tokens."""
    record, some = greedy_record(target), None
    if draft_vocab is not None:
        some = frequent_tokens(count_tokens([record], target.vocab_size), draft_vocab)
    with TrainingRun(folder, {}) as run:
        made = trainer(target, [record], run, heads=new_heads(target, K, 1, token_map=some))
        made.train()
    return record, made
