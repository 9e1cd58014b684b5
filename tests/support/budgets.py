"""The budget policy of an engine in this process, and replacements for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import LLM

from vllm_medusa.budget.expected_acceptance import Drafted
from vllm_medusa.budget.policy import AutoBudget, best


def scheduler_of(llm: LLM) -> Any:
    """The engine's `TreeScheduler`."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.scheduler


def policy_of(llm: LLM) -> AutoBudget:
    policy = scheduler_of(llm).policy
    assert isinstance(policy, AutoBudget)
    return policy


def verify_all(patch: pytest.MonkeyPatch, policy: AutoBudget, per_request: int = 255) -> None:
    """Draft the maximum, and verify as much as there is room for."""

    def counts(drafts: list[Drafted], requests: int, room: int, **_: Any) -> list[int]:
        return best([each.survival for each in drafts], min(room, per_request * requests))

    patch.setattr(policy, "counts", counts)
    patch.setattr(policy, "limit", lambda *_: policy.max_drafts)


def fickle(
    patch: pytest.MonkeyPatch,
    llm: LLM,
    drafting: float = 0.8,
    preempting: bool = False,
    max_each: int = 255,
) -> list[int]:
    """Budgets that change with every step: nothing, the maximum, or something in between.

    If ``preempting``, free cache blocks are ignored: requests are preempted for drafts.
    """
    generator, taken = np.random.default_rng(0), []
    policy = policy_of(llm)
    if preempting:
        patch.setattr(scheduler_of(llm), "_free_slots", lambda: 1 << 20)

    def counts(drafts: list[Drafted], requests: int, room: int, **_: Any) -> list[int]:
        survival = [each.survival for each in drafts]
        maximum = max(0, min(sum(map(len, survival)), room, max_each * requests))
        taken.append(int(generator.integers(0, maximum + 1)))
        return best(survival, taken[-1])

    patch.setattr(policy, "counts", counts)
    maximum = policy.max_drafts
    limits = [1, 2, 3, *[maximum] * 5]  # sometimes few heads, sometimes none
    if policy.even:  # all drafts are verified
        limits = list(range(min(maximum, max_each) + 1))

    def limit(*_: Any) -> int:
        found = int(generator.choice(limits)) if generator.random() < drafting else 0
        if policy.even:
            taken.append(found)
        return found

    patch.setattr(policy, "limit", limit)
    return taken
