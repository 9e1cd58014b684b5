"""From the steps of a run to tokens per step, step time and throughput."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One pass over the prompts by one arm."""

    seconds: float  # all steps, prefills included
    tokens: int
    decode_tokens: int
    decode_emissions: int  # (step, request) pairs that yielded decode tokens
    decode_step_seconds: tuple[float, ...]

    @classmethod
    def of(cls, steps: Sequence[Sequence[Any]]) -> Run:
        """Sums up the `steps` of `benchmarks.engine_process`.

        Decode steps are those that yield tokens and in which no request gets its first one.
        """
        decode = [step for step in steps if step[2] and not step[3]]
        return cls(
            seconds=sum(step[0] for step in steps),
            tokens=sum(step[1] for step in steps),
            decode_tokens=sum(step[1] for step in decode),
            decode_emissions=sum(step[2] for step in decode),
            decode_step_seconds=tuple(step[0] for step in decode),
        )

    @property
    def rate(self) -> float:
        """Tokens a second, prefills included."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """An arm against plain vLLM, run in turn: run i of one beside run i of the other."""

    plain: tuple[Run, ...]
    arm: tuple[Run, ...]

    @property
    def ratios(self) -> list[float]:
        """The arm's throughput over plain's, pair by pair."""
        return [arm.rate / plain.rate for plain, arm in zip(self.plain, self.arm, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Plain JSON; times in milliseconds."""
        ratios = self.ratios
        step, plain_step = median_step_ms(self.arm), median_step_ms(self.plain)
        return {
            "tau": round(tau(self.arm), 4),
            "step_ms": round(step, 3),
            "plain_step_ms": round(plain_step, 3),
            "step_ratio": round(step / plain_step, 4),
            "tokens_per_second": round(statistics.median(run.rate for run in self.arm), 2),
            "plain_tokens_per_second": round(statistics.median(run.rate for run in self.plain), 2),
            "ratio": {
                "pairs": [round(ratio, 4) for ratio in ratios],
                "min": round(min(ratios), 4),
                "median": round(statistics.median(ratios), 4),
                "max": round(max(ratios), 4),
            },
        }


def tau(runs: Sequence[Run]) -> float:
    """Tokens per verification step and request; 1 for plain decoding."""
    emissions = sum(run.decode_emissions for run in runs)
    return sum(run.decode_tokens for run in runs) / emissions if emissions else float("nan")


def median_step_ms(runs: Sequence[Run]) -> float:
    """The median decode step."""
    steps = [seconds for run in runs for seconds in run.decode_step_seconds]
    return 1e3 * statistics.median(steps) if steps else float("nan")
