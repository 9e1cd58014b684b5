"""One set of heads with trees of several sizes, each beside plain vLLM: which size pays most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_medusa.offline.batch import Engine
from vllm_medusa.offline.in_turn import InTurn, Runner, run_in_turn
from vllm_medusa.offline.prompts import Prompt

_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class Budget:
    """A tree of ``num_draft_tokens`` nodes beside plain vLLM."""

    num_draft_tokens: int
    comparison: InTurn

    @property
    def ratio(self) -> float:
        """Throughput over plain vLLM's, of the median round."""
        return statistics.median(self.comparison.ratios)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        c = self.comparison
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "tau": c.candidate.acceptance.tau,
            "histogram": list(c.candidate.acceptance.histogram),
            "steps": c.candidate.acceptance.steps,
            "plain_steps": c.baseline.acceptance.steps,
            "ratio": self.ratio,
            "ratios": c.ratios,
            "tokens_per_second": statistics.median(c.candidate.rates),
            "plain_tokens_per_second": statistics.median(c.baseline.rates),
            "tokens": c.baseline.tokens,
            "requests": c.requests,
            "identical": c.identical,
            "differing_requests": len(c.differences),
            "differences": [
                {
                    "request_id": d.prompt.request_id,
                    "position": d.position,
                    "what": d.reason,
                    "plain": d.baseline,
                    "medusa": d.candidate,
                }
                for d in c.differences[:_SHOWN_DIFFERENCES]
            ],
        }


def measure(
    plain: Engine | Runner,
    medusa: Engine | Runner,
    num_draft_tokens: int,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    seed: int | None,
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> Budget:
    """Compare in ``rounds`` rounds, after one group through both engines to warm them up.

    Raises:
        ValueError: there are no prompts, or an engine refuses one.

    """
    run_in_turn(plain, medusa, prompts[:concurrency], concurrency=concurrency, seed=seed)
    comparison = run_in_turn(
        plain,
        medusa,
        prompts,
        concurrency=concurrency,
        seed=seed,
        rounds=rounds,
        progress=progress,
    )
    return Budget(num_draft_tokens, comparison)
