"""Compare tokens and speed of engines that alternate on the same prompts.

All run the same groups of prompts, one engine right after the other, and the order alternates
from group to group, so that changes in the machine's load affect all equally.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

from vllm_medusa.offline.batch import AcceptanceCounts, Result
from vllm_medusa.offline.prompts import Prompt

_SHOWN_DIFFERENCES = 5


class Runner(Protocol):
    """An engine that measures its own time, such as `vllm_medusa.offline.process.EngineProcess`."""

    def run(
        self, prompts: Sequence[Prompt], concurrency: int, seed: int | None
    ) -> tuple[list[Result], float]:
        """Results of `vllm_medusa.offline.batch.run_batch`, and the time in seconds."""


@dataclass
class Timed:
    """Results and rates of one engine over all rounds."""

    results: dict[int, Result] = field(default_factory=dict)  # of the first round, by prompt index
    seconds: float = 0.0
    tokens: int = 0
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    rates: list[float] = field(default_factory=list)  # tokens per second of each round
    latest: dict[int, Result] = field(default_factory=dict)  # of the last round, by prompt index

    def add(self, results: Sequence[Result], seconds: float) -> None:
        """Add a group. Raises ValueError: a prompt was refused."""
        self.seconds += seconds
        for result in results:
            if result.error is not None:
                raise ValueError(f"prompt {result.prompt.request_id} was refused: {result.error}")
            self.tokens += result.num_tokens
            self.acceptance.update(result.acceptance)
            self.results.setdefault(result.prompt.index, result)
            self.latest[result.prompt.index] = result


@dataclass(frozen=True)
class Difference:
    """First difference between candidate and baseline; ``position`` counts tokens from 0."""

    prompt: Prompt
    position: int
    baseline: int | None  # token id; None after the end
    candidate: int | None
    reason: str = "token"  # or "finish reason"
    context: tuple[int, ...] = ()  # token ids before it, prompt included


@dataclass
class InTurn:
    """Figures of both engines, and all requests whose answers differ."""

    baseline: Timed = field(default_factory=Timed)
    candidate: Timed = field(default_factory=Timed)
    requests: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every token, length and finish reason agrees, in every round."""
        return self.requests > 0 and not self.differences

    @property
    def ratio(self) -> float:
        """The candidate's throughput divided by the baseline's."""
        plain, judged = self.baseline, self.candidate
        done = judged.seconds * plain.tokens
        return judged.tokens * plain.seconds / done if done else 0.0

    @property
    def ratios(self) -> list[float]:
        """The same for each round."""
        pairs = zip(self.candidate.rates, self.baseline.rates, strict=True)
        return [rate / base if base else 0.0 for rate, base in pairs]

    def figures(self) -> dict[str, Any]:
        """Plain JSON values; the candidate is Medusa; rates and ratio are medians over rounds."""
        plain, medusa = self.baseline, self.candidate
        return {
            "tau": medusa.acceptance.tau,
            "histogram": medusa.acceptance.histogram,
            "steps": medusa.acceptance.steps,
            "plain_steps": plain.acceptance.steps,
            "ratio": statistics.median(self.ratios),
            "ratios": self.ratios,
            "tokens_per_second": statistics.median(medusa.rates),
            "plain_tokens_per_second": statistics.median(plain.rates),
            "tokens": plain.tokens,
            "requests": self.requests,
            "identical": self.identical,
            "differing_requests": len(self.differences),
            "differences": [
                {
                    "request_id": d.prompt.request_id,
                    "position": d.position,
                    "reason": d.reason,
                    "plain": d.baseline,
                    "medusa": d.candidate,
                }
                for d in self.differences[:_SHOWN_DIFFERENCES]
            ],
        }


def run_in_turn(
    engines: Sequence[Runner],  # the reference engine first
    prompts: Sequence[Prompt],  # at least one
    *,
    concurrency: int,  # concurrent prompts per engine
    seed: int | None,  # prompt ``index`` uses ``seed + index`` in all
    turn: int | None = None,  # prompts per group; None: ``concurrency``
    rounds: int = 1,  # number of repetitions; tokens of every round are compared
    seconds: float = math.inf,  # time limit; later rounds that would exceed it are skipped
    warm_up: bool = False,  # first run one group through all engines without counting it
    previous: Sequence[InTurn] = (),  # figures of other starts of these engines, to add to
    progress: Callable[[int, int], Any] = lambda done, total: None,  # groups of prompts
) -> list[InTurn]:
    """Run the prompts through all engines; each is compared with the first, including itself.

    Raises ValueError: there are no prompts, or an engine refuses one.
    """
    if not prompts:
        raise ValueError("there are no prompts to compare on.")
    if warm_up:
        run_in_turn(engines, prompts[:concurrency], concurrency=concurrency, seed=seed)
    each = turn or concurrency
    groups = [prompts[start : start + each] for start in range(0, len(prompts), each)]
    comparisons = list(previous)
    if not comparisons:
        plain = Timed()
        comparisons = [InTurn(plain, plain), *(InTurn(plain) for _ in engines[1:])]
    candidates = [comparison.candidate for comparison in comparisons]
    baseline = candidates[0]
    order = list(zip(engines, candidates, strict=True))
    began = time.perf_counter()
    for number in range(rounds):
        if number and (time.perf_counter() - began) * (number + 1) / number > seconds:
            break
        before = [(timed.tokens, timed.seconds) for timed in candidates]
        for done, group in enumerate(groups, start=1):
            order.reverse()
            for engine, timed in order:
                timed.add(*engine.run(group, concurrency, seed))
            for comparison in comparisons:
                right, judged = baseline.latest, comparison.candidate.latest
                comparison.requests += len(group)
                found = [difference(right[p.index], judged[p.index]) for p in group]
                comparison.differences += filter(None, found)
            progress(number * len(groups) + done, rounds * len(groups))
        for timed, (tokens, earlier) in zip(candidates, before, strict=True):
            spent = timed.seconds - earlier
            timed.rates.append((timed.tokens - tokens) / spent if spent else 0.0)
    return comparisons


def difference(right: Result, judged: Result) -> Difference | None:
    """The first difference of ``judged`` from the right answers to the same prompt."""
    for a, b in zip(right.answers, judged.answers, strict=True):
        for position, (x, y) in enumerate(zip_longest(a.token_ids, b.token_ids)):
            if x != y:
                context = (*a.prompt_token_ids, *a.token_ids[:position])
                return Difference(right.prompt, position, x, y, context=context)
        if (a.finish_reason, a.stop_reason) != (b.finish_reason, b.stop_reason):
            end = len(a.token_ids)
            return Difference(right.prompt, end, None, None, "finish reason")
    return None
