"""Dynamic trees on vLLM's V2 runner: whatever the topologies and counts, plain vLLM's tokens.

Runs in `test_sampling_on_v2`. That acceptances are V1's is in `test_same_as_v1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.budgets import fickle
from support.engines import complete, engine, greedy, metric, random_prompts
from support.models import VOCAB
from support.no_waiting import watched
from support.outcomes import Outcome, assert_same, by_seed, outcomes, seeded
from support.planted import planted, planted_by_seed
from support.random_topologies import random_topologies
from support.reference import Reference, differing, plain_greedy
from support.runner import ON_V2, on_v1
from support.spies import mean_accepted, recorded_steps, tree_rows
from vllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_sampling_on_v2.py"),
]

if ON_V2:
    from vllm_medusa.worker.drafting import MedusaDrafter
    from vllm_medusa.worker.v2.topologies import Topologies

TOKENS = 16
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    with on_v1(), engine(chaotic_llama) as llm:
        return plain_greedy(llm, random_prompts(10, VOCAB, shortest=8, longest=50), TOKENS)


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Draws, truncation, penalties: what a path's tokens decide among them."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "logprobs": 2, "top_k": 20},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_p": 0.8, "min_tokens": 5, "stop_token_ids": [7, 8]},
    ]
    params = [seeded(1, 100 + i, max_tokens=12, **kind)[0] for i, kind in enumerate(kinds)]
    return random_prompts(len(kinds), VOCAB, longest=30, seed=3), params


@pytest.fixture(scope="module")
def plain_seeded(chaotic_llama: str) -> list[Outcome]:
    with engine(chaotic_llama) as llm:
        return outcomes(llm, *mixed())


@pytest.fixture(scope="module")
def llm(
    reference: Reference, plain_seeded: object, chaotic_llama: str, random_heads: str
) -> Iterator[LLM]:
    """Few blocks and few rows a step: requests are preempted, and drafts have to make room."""
    config = {"method": "medusa", "model": random_heads, "budget": "auto"}
    with engine(
        chaotic_llama, config, block_size=32, num_gpu_blocks_override=14, max_model_len=256,
        max_num_batched_tokens=72, max_num_seqs=8,
    ) as llm:  # fmt: skip
        yield llm


def run(llm: LLM, reference: Reference) -> float:
    """Plant the future on the trees: the tokens must be plain vLLM's; returns what is accepted."""
    with planted(reference.prompts, reference.outputs, VOCAB), recorded_steps() as steps:
        got = complete(llm, reference.prompts, greedy(TOKENS))
    assert differing(reference.completions, got) == []
    return mean_accepted(steps)


def test_every_request_and_step_has_another_tree(
    llm: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    topologies = random_topologies(monkeypatch)
    taken = fickle(monkeypatch, llm, preempting=True)
    before = metric(llm, "num_preemptions")
    with recorded_steps() as steps:
        assert run(llm, reference) > 0.5
    assert metric(llm, "num_preemptions") > before
    assert len(topologies) > 2 * len(reference.prompts)
    assert 0 in taken and len({row.num_nodes for row in tree_rows(steps)}) > 5
    assert any(not row.is_tree for step in steps for row in step if not row.is_prefill)


def of_the_neighbour(patch: Patch) -> None:
    """A request is verified by the topology of another."""
    trees = Topologies.trees
    patch.setattr(Topologies, "trees", lambda self, slots, *args: trees(self, slots.roll(1), *args))


def of_an_earlier_step(patch: Patch) -> None:
    """Requests are verified by what was first drafted for their slots."""
    keep, first = Topologies.keep, {}

    def noted(self: Topologies, slots: torch.Tensor, order: torch.Tensor) -> None:
        for slot, row in zip(slots.tolist(), order, strict=True):
            first.setdefault(slot, row)
        keep(self, slots, order)

    def wrong(self: Topologies, slots: torch.Tensor, width: int, counts: torch.Tensor) -> Any:
        order = self.order.clone()
        for slot, row in first.items():
            order[slot, : len(row)] = row
        return self.pool.trees(order[slots, :width], counts)

    patch.setattr(Topologies, "keep", noted)
    patch.setattr(Topologies, "trees", wrong)


@pytest.mark.parametrize("control", [of_the_neighbour, of_an_earlier_step])
def test_a_wrong_topology_costs_acceptance(
    llm: LLM, reference: Reference, monkeypatch: Patch, control: Any
) -> None:
    """Never equality: attention, positions and the walk still go by one and the same tree."""
    random_topologies(monkeypatch)
    fickle(monkeypatch, llm, drafting=1.0, preempting=True)
    part = reference.part(0, 6)
    right = run(llm, part)
    control(monkeypatch)
    assert run(llm, part) < 0.7 * right


def test_seeded_requests_and_penalties(
    llm: LLM, plain_seeded: list[Outcome], monkeypatch: Patch
) -> None:
    """Nothing of it waits for the device."""
    fickle(monkeypatch, llm, preempting=True)
    calls = watched(monkeypatch)
    with planted_by_seed(by_seed(plain_seeded), VOCAB), recorded_steps() as steps:
        got = outcomes(llm, *mixed())
    assert_same(plain_seeded, got)
    assert mean_accepted(steps) > 0.3
    assert min(calls.values()) > 2 and len(calls) == 4


def test_without_drafts_the_heads_rest(llm: LLM, reference: Reference, monkeypatch: Patch) -> None:
    """A step that wants no drafts runs no head, and the next one is plain vLLM's."""
    part = reference.part(3, 4)
    fickle(monkeypatch, llm, drafting=0.0, preempting=True)

    def unwanted(*args: Any) -> None:
        raise AssertionError("the heads ran")

    monkeypatch.setattr(MedusaDrafter, "grow", unwanted)
    with recorded_steps() as steps:
        assert differing(part.completions, complete(llm, part.prompts, greedy(TOKENS))) == []
    assert steps and not tree_rows(steps)


def test_it_learns(llm: LLM, reference: Reference) -> None:
    """Nothing is replaced: whatever it decides, tokens are plain vLLM's."""
    core: Any = llm.llm_engine.engine_core
    budget = core.engine_core.scheduler.budget
    before = budget.cost.steps
    part = reference.part(0, 5)
    assert differing(part.completions, complete(llm, part.prompts, greedy(TOKENS))) == []
    assert budget.cost.steps > before + TOKENS // 2
