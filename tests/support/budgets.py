"""What the scheduler of an engine in this process decides by, and other decisions in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import LLM

from vllm_medusa.budget.even import EvenBudget


def budget_of(llm: LLM) -> Any:
    """The engine's `NodeBudget`."""
    return llm.llm_engine.engine_core.engine_core.scheduler.budget


def fickle(
    patch: pytest.MonkeyPatch,
    llm: LLM,
    drafting: float = 0.8,
    preempting: bool = False,
    most_each: int = 255,
) -> list[int]:
    """Budgets that change with every step: nothing, all there is room for, something between.

    If ``preempting``, cache blocks are no concern: requests have to make room for drafts.
    """
    generator, taken = np.random.default_rng(0), []
    if preempting:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        patch.setattr(scheduler, "_free_slots", lambda: 1 << 20)

    def choose(gain: np.ndarray, requests: int, free_rows: int) -> int:
        most = max(0, min(len(gain) - 1, free_rows, most_each * requests))
        taken.append(int(generator.integers(0, most + 1)))
        return taken[-1]

    patch.setattr(budget_of(llm), "choose", choose)
    budget = budget_of(llm)
    most = budget.max_per_request
    limits = [1, 2, 3, *[most] * 5]  # few heads now and then, none now and then
    if isinstance(budget, EvenBudget):  # what is drafted is verified
        limits = list(range(min(most, most_each) + 1))

    def draft_next(*_: Any) -> int:
        limit = int(generator.choice(limits)) if generator.random() < drafting else 0
        if isinstance(budget, EvenBudget):
            taken.append(limit)
        return limit

    patch.setattr(budget, "draft_next", draft_next)
    return taken
