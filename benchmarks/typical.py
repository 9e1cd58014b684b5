"""Benefit and cost of typical acceptance: tokens per step against text quality.

    python -m benchmarks typical --temperatures 0.3 0.6 0.9 1.2

Plain vLLM, lossless and typical acceptance answer the same prompts with the same seeds. For the
answers: the mean log-probability of a token under the target at temperature 1; the share of 4-grams
that occurred before in the same answer; the share of distinct 2-grams of an answer. Lossless
answers must equal plain vLLM's, and so must typical ones at temperature 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.case import Case, Plot, Row
from benchmarks.compare import COLUMNS
from benchmarks.engines import Arm, EngineOptions, compare
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import Above, AtLeastZero, FromZero, Positive, option

DELTA = 0.3  # the paper's, in addition to the square root of epsilon


class TypicalOptions(EngineOptions):
    """Settings to measure."""

    nodes: Positive = option("draft nodes per request", default=7)
    epsilons: tuple[Above, ...] = option(default=(0.01, 0.04, 0.09, 0.25))
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.0, 0.3, 0.7, 1.0))
    batch: tuple[Positive, ...] = option("concurrent requests", default=(8,))
    rounds: FromZero = option(default=0)


def arms(options: TypicalOptions) -> list[Arm]:
    """Lossless, and typical with both deltas of each epsilon; one engine for all."""
    config = medusa_config(str(options.drafter.absolute()), {"budget": options.nodes})
    found = [Arm("lossless", config, request={"medusa": {"acceptance": "lossless"}})]
    for epsilon in options.epsilons:
        for delta in dict.fromkeys((DELTA, round(math.sqrt(epsilon), 6))):
            what = {"epsilon": epsilon, "delta": delta}
            request = {"medusa": {"acceptance": "typical", **what}}
            name = f"typical, epsilon {epsilon:g}, delta {delta:.3g}"
            found.append(Arm(name, config, what, request=request, exact=False))
    return found


def run(options: TypicalOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm and temperature."""
    options = options.ready(progress)
    plain = Arm("plain, again", None)
    judge = Judge(str(options.target))
    yield from compare([plain, *arms(options)], options, progress, options.tasks(), judge=judge)


class Judge:
    """Text quality according to the target itself, in transformers."""

    def __init__(self, target: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def __call__(self, results: Sequence[Result]) -> dict[str, Any]:
        """Means over all tokens, and over answers."""
        import torch

        log_p, answers = 0.0, [answer for result in results for answer in result.answers]
        for answer in answers:
            prompt, ids = list(answer.prompt_token_ids), answer.token_ids
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1))
            log_p += float(chosen.sum())
        return {
            "log_p": log_p / sum(len(answer.token_ids) for answer in answers),
            "repeated": sum(1 - distinct(a.token_ids, 4) for a in answers) / len(answers),
            "distinct": sum(distinct(a.token_ids, 2) for a in answers) / len(answers),
        }


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of a text's n-grams that are distinct; 1 if it has none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


CASE = Case(
    TypicalOptions,
    run,
    {
        **{key: COLUMNS[key] for key in ("texts", "temperature")},
        "arm": ("acceptance", ""),
        **{key: COLUMNS[key] for key in ("tau", "tau_error", "steps", "ratio")},
        "log_p": ("mean log p", ".3f"),
        "repeated": ("repeated 4-grams", ".3f"),
        "distinct": ("distinct 2-grams", ".3f"),
    },
    quick={"prompts": 2, "max_tokens": 24, "temperatures": (0.7,), "epsilons": (0.09,)},
    plot=Plot("tau", ("log_p", "repeated"), log=False),
)
