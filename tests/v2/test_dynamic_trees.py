"""Dynamic trees on vLLM's V2 runner, scheduled ahead: plain vLLM's tokens for any topology.

Runs in `test_on_v2`. `tests/e2e/test_dynamic_trees.py` compares acceptance with decode.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.budgets import fickle, policy_of, scheduler_of, verify_all
from support.engines import complete, engine, greedy, medusa, metric, random_prompts
from support.models import VOCAB
from support.no_waiting import watched
from support.outcomes import Outcome, assert_same_with_trees, one_of_each
from support.planted import random_topologies
from support.reference import Reference, differing, plain_greedy
from support.runner import ON_V2, async_scheduling, on_v1
from support.spies import mean_accepted, recorded_steps, tree_rows
from vllm import LLM, envs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_on_v2.py"),
]

if ON_V2:
    from vllm_medusa.integration.drafters.medusa_drafter import MedusaDrafter
    from vllm_medusa.integration.startup import startup_timing

TOKENS = 16
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    with on_v1(), engine(chaotic_llama) as llm:
        return plain_greedy(llm, random_prompts(10, VOCAB, shortest=8, longest=50), TOKENS)


@pytest.fixture(scope="module")
def llm(
    reference: Reference, plain_seeded: object, chaotic_llama: str, random_heads: str
) -> Iterator[LLM]:
    """Few blocks: requests are preempted."""
    config = medusa(random_heads, budget="auto")
    with few_steps_to_time() as timed, async_scheduling(), engine(
        chaotic_llama, config, block_size=32, num_gpu_blocks_override=14, max_model_len=256,
        max_num_batched_tokens=256, max_num_seqs=8,
    ) as llm:  # fmt: skip
        assert isinstance(scheduler_of(llm), AsyncScheduler)
        assert policy_of(llm).cost.steps > 0
        assert max(timed) == 4
        yield llm


@contextmanager
def few_steps_to_time() -> Iterator[list[int]]:
    """With the interpreter, the whole plan takes ten seconds; nothing is stored.

    Yields the number of nodes in each step that is timed at start-up.
    """
    nodes, original = [], startup_timing._ScriptedBudget.observe

    def observe(self: Any, rows: int, requests: int, *more: Any) -> None:
        nodes.append(rows - requests)
        original(self, rows, requests, *more)

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("VLLM_CACHE_ROOT", folder)
        envs.disable_envs_cache()  # vLLM reads its variables once
        patch.setattr(startup_timing._ScriptedBudget, "observe", observe)
        patch.setattr(startup_timing, "_PLAN", ((1, (0, 4)),))
        patch.setattr(startup_timing, "_REPEATS", 1)
        patch.setattr(startup_timing, "SECONDS", 60.0)
        yield nodes
    envs.disable_envs_cache()


def test_trees_differ_per_request_and_step(
    llm: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    topologies = random_topologies(monkeypatch)
    taken = fickle(monkeypatch, llm, preempting=True)
    before = metric(llm, "num_preemptions")
    _, steps, _ = reference.planted_on(llm)
    assert mean_accepted(steps) > 0.5
    assert metric(llm, "num_preemptions") > before
    assert len(topologies) > 2 * len(reference.prompts)
    assert taken and len({row.num_nodes for row in tree_rows(steps)}) > 5
    assert any(not row.is_tree for step in steps for row in step if not row.is_prefill)


def test_seeded_requests_and_penalties(
    llm: LLM, plain_seeded: list[Outcome], monkeypatch: Patch
) -> None:
    """Without host sync."""
    fickle(monkeypatch, llm, preempting=True, max_each=7)
    calls = watched(monkeypatch)
    steps = assert_same_with_trees(llm, plain_seeded, *one_of_each())
    assert mean_accepted(steps) > 0.3
    assert min(calls.values()) > 2 and len(calls) == 4


def test_heads_do_not_run_without_drafts(
    llm: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    """A step without drafts runs no head, and the next one is plain vLLM's."""
    part = reference.part(3, 4)
    fickle(monkeypatch, llm, drafting=0.0, preempting=True)

    def unwanted(*args: Any) -> None:
        raise AssertionError("the heads ran")

    monkeypatch.setattr(MedusaDrafter, "draft", unwanted)
    with recorded_steps() as steps:
        assert differing(part.completions, complete(llm, part.prompts, greedy(TOKENS))) == []
    assert steps and not tree_rows(steps)


def test_estimates_are_updated(llm: LLM, reference: Reference, monkeypatch: Patch) -> None:
    """Tokens always equal plain vLLM's; the policy receives times, survivals and acceptance."""
    policy, seen = policy_of(llm), []
    observe = policy.acceptance.observe

    def spy(drafts: Any, verified: Any, accepted: Any) -> None:
        for draft in drafts:
            assert draft.survival and draft.survival == sorted(draft.survival, reverse=True)
            assert (draft.kind, draft.copied) == (0, None)  # greedy
            assert draft.limit is None or 0 < draft.limit < policy.max_drafts
        seen.extend(zip(verified, accepted, strict=True))
        observe(drafts, verified, accepted)

    scheduler_of(llm).pending.clear()  # from other tests' requests
    monkeypatch.setattr(policy.acceptance, "observe", spy)
    monkeypatch.setattr(scheduler_of(llm), "_free_slots", lambda: 1 << 20)
    verify_all(monkeypatch, policy, per_request=5)
    before = policy.cost.steps
    part = reference.part(0, 5)
    _, steps, _ = part.planted_on(llm)
    assert policy.cost.steps > before + 3
    trees = [(row.num_nodes - 1, row.accepted) for row in tree_rows(steps)]
    assert len(seen) > 10 and not Counter(seen) - Counter([*trees, (0, 0)] * 9)
    assert sum(accepted for _, accepted in seen) >= 0.8 * sum(accepted for _, accepted in trees)
