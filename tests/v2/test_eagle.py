"""EAGLE-3 trees as on CUDA: V2 schedules a step ahead, and our kernel attends to the branches.

Interpreted, so only a few requests; `tests/e2e/test_eagle.py`, which also runs on V2,
tests many. Runs in `test_on_v2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.budgets import scheduler_of
from support.eagle_runs import Case, eagle_config
from support.eagle_steps import assert_dense, recorded_trees
from support.engines import Completion, complete, engine, greedy, metric, random_prompts, worker_of
from support.models import VOCAB
from support.no_waiting import watched
from support.planted import PlantedCopies, planted
from support.reference import differing
from support.runner import ON_V2, async_scheduling
from support.spies import mean_accepted, recorded_steps, tree_rows
from vllm import LLM
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_on_v2.py"),
]

if ON_V2:
    from support.triton_attention import triton_attention_on_cpu

    from vllm_medusa.integration.attention import cuda_attention
    from vllm_medusa.integration.v2 import cuda_warmup

TOKENS, DEPTH = 8, 3
PROMPTS = random_prompts(2, VOCAB, shortest=30, longest=36, seed=7)  # one takes two chunks
PARAMS = [greedy(TOKENS), greedy(TOKENS, temperature=0.9, seed=5)]
SMALL: dict[str, Any] = {"max_num_batched_tokens": 40, "block_size": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def case(eagle_case: Case) -> Case:
    return eagle_case


@pytest.fixture(scope="module")
def plain(case: Case) -> list[Completion]:
    with engine(case.target, **SMALL) as llm:
        return complete(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def llm(case: Case, plain: object) -> Iterator[LLM]:
    tree = eagle_config(case, {"width": 3, "depth": DEPTH}, budget=7, lookup=True)
    with triton_attention_on_cpu(), async_scheduling(), engine(case.target, tree, **SMALL) as llm:
        assert isinstance(scheduler_of(llm), AsyncScheduler)
        yield llm


def run(llm: LLM, plain: list[Completion], count: int = 2) -> None:
    """Plant future tokens on the drafter's trees."""
    prompts, expected = PROMPTS[:count], plain[:count]
    outputs = [list(completion.token_ids) for completion in expected]
    with planted(prompts, outputs, VOCAB), recorded_steps() as steps:
        assert differing(expected, complete(llm, prompts, PARAMS[:count])) == []
    assert mean_accepted(steps) > 0.7


def test_no_step_waits_for_the_device(
    llm: LLM, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watched(monkeypatch)
    run(llm, plain)
    assert min(calls.values()) > 2 and len(calls) == 4


def test_copies_are_deeper_than_its_levels(
    llm: LLM, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[*p, *c.token_ids] for p, c in zip(PROMPTS, plain, strict=True)]
    PlantedCopies(texts).plant(monkeypatch)
    before = metric(llm, "lookup_accepted_tokens")
    with recorded_steps() as steps:
        assert differing(plain[:1], complete(llm, PROMPTS[:1], PARAMS[:1])) == []
    assert max(row.accepted for row in tree_rows(steps)) > DEPTH
    assert metric(llm, "lookup_accepted_tokens") > before + DEPTH


def dense(case: Case, llm: LLM, plain: list[Completion]) -> int:
    """Check one request's drafts and entries against dense forward passes; returns its nodes."""
    with recorded_trees(1) as trees:
        run(llm, plain, 1)
    return sum(assert_dense(grown, case.drafter, case.model) for grown in trees)


def test_entries_and_drafts_equal_a_dense_pass(
    case: Case, llm: LLM, plain: list[Completion]
) -> None:
    assert dense(case, llm, plain) > 12


def test_control_visible_siblings(
    case: Case, llm: LLM, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a branch attended to all expanded nodes, its drafts would differ from dense ones."""
    attend = cuda_attention.paged_tree_attention

    def wrong(query: Any, keys: Any, values: Any, batch: Any, *args: Any, **named: Any) -> Any:
        if batch.rows_before:
            batch = replace(batch, is_tree=batch.is_tree.logical_not())
        return attend(query, keys, values, batch, *args, **named)

    monkeypatch.setattr(cuda_attention, "paged_tree_attention", wrong)
    with pytest.raises(AssertionError, match="not close"):
        dense(case, llm, plain)


def test_warm_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before graph capture levels attend in parts and whole; the cache is unchanged."""
    runner = worker_of(llm).model_runner
    speculator = runner.speculator
    layers = speculator.vllm_config.compilation_config.static_forward_context
    cache = layers[speculator.drafter.draft_attn_groups[0].layer_names[0]].kv_cache
    attend, before, seen = cuda_attention.paged_tree_attention, cache.clone(), set()

    def spy(query: Any, keys: Any, values: Any, batch: Any, *args: Any, **named: Any) -> Any:
        seen.add((batch.max_query_len, batch.num_splits > 1))
        return attend(query, keys, values, batch, *args, **named)

    monkeypatch.setattr(cuda_attention, "paged_tree_attention", spy)
    cuda_warmup.warm_up(runner)
    width = speculator.drafter.beam.width
    assert seen >= {(width, False), (width, True)} and cache.equal(before)
