"""Dynamic trees: another topology for every request and step, the same tokens as plain vLLM.

decode.py uses the same trees, so acceptance is compared step by step; random topologies replace the
best ones to cover shapes that no head would choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.assets import HEADS as TRAINED_HEADS
from support.assets import TARGET, code_prompts, trained_model
from support.budgets import fickle, policy_of, scheduler_of, verify_all
from support.engines import (
    complete,
    engine,
    greedy,
    medusa,
    metric,
    random_prompts,
    start,
    stop,
    worker_of,
)
from support.metrics import added, counts
from support.models import VOCAB
from support.planted import random_topologies
from support.reference import Reference, differing, plain_greedy
from support.runner import sized
from support.spies import assert_reported, mean_accepted, recorded_steps, tree_rows
from vllm import LLM, envs
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_medusa.budget import policy
from vllm_medusa.budget.cost import StepCost
from vllm_medusa.decode import decode
from vllm_medusa.heads.cpu import PackedHeads
from vllm_medusa.integration.metrics import KINDS
from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.integration.startup import startup_timing
from vllm_medusa.integration.startup.options import TreeSettings
from vllm_medusa.integration.v1 import runner
from vllm_medusa.tree.dynamic import DynamicTree

pytestmark = pytest.mark.engine

TOKENS = 40
# output lengths, in turn: the last drafts of each are limited by depth
LENGTHS = sized((48, 7, 3, 1, 33), (16, 7, 3, 1))
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    with engine(chaotic_llama) as llm:
        return plain_greedy(llm, random_prompts(24, VOCAB, shortest=8, longest=120), TOKENS)


@pytest.fixture(scope="module")
def llm(reference: Reference, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    """48 blocks of 32: some requests are preempted and restarted."""
    config = medusa(random_heads, budget=20)
    with engine(chaotic_llama, config, block_size=32, num_gpu_blocks_override=48) as llm:
        yield llm


@pytest.mark.parametrize("budget", sized([7, 31], [7]))
def test_accepts_what_the_oracle_accepts(budget: int) -> None:
    """Trained heads on real prompts, in fp32."""
    prompts = [prompt[:60] for prompt in code_prompts(0, sized(10, 4))]
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(len(prompts))]
    with engine(TARGET, medusa(TRAINED_HEADS, budget=budget)) as llm, recorded_steps() as steps:
        tree = TreeSettings.of(llm.llm_engine.vllm_config).tree
        assert isinstance(tree, DynamicTree) and tree.num_draft_tokens == budget
        got = complete(llm, prompts, [greedy(length) for length in lengths])
    model, heads = trained_model()
    assert_reported(steps, prompts, got)
    shapes = set()
    for prompt, length, completion in zip(prompts, lengths, got, strict=True):
        expected = decode(model, heads, tree, torch.tensor(prompt), length)
        assert list(completion.token_ids) == expected.token_ids
        assert list(completion.accepted) == expected.accepted_per_step
        shapes |= set(completion.drafted)
    assert budget in shapes and (budget < 31 or 10 in shapes)  # 10 nodes of depth 1
    assert mean_accepted(steps) > 0.3


def acceptance(llm: LLM, reference: Reference) -> float:
    return mean_accepted(reference.planted_on(llm)[1])


def test_random_topologies(llm: LLM, reference: Reference, monkeypatch: Patch) -> None:
    topologies = random_topologies(monkeypatch)
    before = metric(llm, "num_preemptions")
    assert acceptance(llm, reference) > 1
    assert metric(llm, "num_preemptions") > before
    assert len(topologies) > 5 * len(reference.prompts)


def test_steps_without_drafts_are_plain_vllms(
    llm: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    """Without drafts, only a prefill proposes; a step without tokens does not end drafting."""
    model_runner, proposals = worker_of(llm).model_runner, []
    propose = model_runner._propose
    monkeypatch.setattr(
        model_runner, "_propose", lambda *args: proposals.append(args[0]) or propose(*args)
    )
    for limit in (0, None):
        proposals.clear()
        own = {"medusa": {"max_draft_tokens": limit}} if limit is not None else None
        with recorded_steps() as steps:
            (got,) = complete(llm, reference.prompts[:1], greedy(TOKENS, extra_args=own))
        assert list(got.token_ids) == list(reference.completions[0].token_ids)
        assert len(proposals) == (len(steps) if limit is None else 1) and len(steps) > 1
        assert proposals[0].scheduled_new_reqs
        model_runner.execute_model(SchedulerOutput.make_empty())


def of_another_request(patch: Patch) -> None:
    """A request is verified with the topology of another."""
    kept = RequestTrees.topologies

    def wrong(self: RequestTrees, slots: torch.Tensor, width: int, counts: torch.Tensor) -> Any:
        drafted = (counts > 1).nonzero().flatten()
        slots = slots.index_copy(0, drafted, slots[drafted].roll(-1))
        return kept(self, slots, width, counts)

    patch.setattr(RequestTrees, "topologies", wrong)


def off_by_one(patch: Patch) -> None:
    """The parents start one node late."""
    kept = RequestTrees.topologies

    def wrong(self: RequestTrees, slots: torch.Tensor, width: int, counts: torch.Tensor) -> Any:
        now = self.parents.clone()
        late = now[:, 1:].roll(-1, 1).minimum(torch.arange(now.shape[1] - 1))
        self.parents[:, 1:] = late
        try:
            return kept(self, slots, width, counts)
        finally:
            self.parents.copy_(now)

    patch.setattr(RequestTrees, "topologies", wrong)


CONTROLS = [of_another_request, off_by_one]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_a_wrong_topology_costs_acceptance(
    llm: LLM, reference: Reference, monkeypatch: Patch, control: Callable[[Patch], None]
) -> None:
    """Tokens stay equal: attention, positions and the walk still use the same tree."""
    random_topologies(monkeypatch)
    right = acceptance(llm, reference)
    control(monkeypatch)
    assert acceptance(llm, reference) < 0.7 * right


FEW_ROWS = {
    "block_size": 32,
    "num_gpu_blocks_override": 48,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
}


def _surcharge(cost: StepCost) -> float:
    """Cost of four drafts of a request and all heads, relative to a plain step."""
    return cost.ms(5, 1, 4) / cost.ms(1, 1, 0)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder for step costs; initially empty."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        envs.disable_envs_cache()  # vLLM reads its variables once
        yield folder / "medusa"
    envs.disable_envs_cache()


@pytest.fixture(scope="module")
def automatic(
    reference: Reference, chaotic_llama: str, random_heads: str, costs: Path
) -> Iterator[LLM]:
    """Few rows per step, so that drafts could delay requests and prefills.

    An engine of the same kind ran before. Start-up times are fixed: other tests run in parallel.
    """
    config = medusa(random_heads, budget="auto")
    learned = []  # for steps with drafts, whether they update costs

    def observe(each: Any, rows: int, requests: int, limit: int, ms: float, tokens: float) -> None:
        assert ms > 0
        if rows > requests:
            learned.append(each.learns)
        if each.learns:
            each.cost.observe(rows, requests, limit, 1.5 + 0.1 * rows + 0.1 * limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_timing._ScriptedBudget, "observe", observe)
        patch.setattr(startup_timing, "SECONDS", 300.0)  # complete all steps on a busy machine
        with engine(chaotic_llama, config, **FEW_ROWS) as first:
            assert policy_of(first).cost.steps > 20
        assert learned[:6] == [False, True] * 3  # the first of each number of nodes is slow
        (file,) = costs.glob("*.json")
        document = json.loads(file.read_text())
        plain, *others, limits = document["log_curves"]  # cost of drafts and heads
        expensive = [plain, *([value + 2.0 for value in curve] for curve in others), limits]
        file.write_text(json.dumps(document | {"log_curves": expensive}))
        (costs.parent / "stale.json").write_text(file.read_text())
        llm = start(chaotic_llama, config, **FEW_ROWS)
    yield llm
    stop(llm)


def test_steps_are_timed_at_start_up(automatic: LLM, costs: Path) -> None:
    """The costs are stored for later engines; dummy requests have no lasting effect."""
    (kept,) = (json.loads(file.read_text()) for file in costs.glob("*.json"))
    assert 20 < kept["steps"] <= policy_of(automatic).cost.steps
    stale = json.loads((costs.parent / "stale.json").read_text())
    assert stale["steps"] < kept["steps"]
    was, now = (StepCost.from_dict(each) for each in (stale, kept))
    true = (1.5 + 0.1 * 5 + 0.1 * 4) / (1.5 + 0.1)  # see `automatic`
    assert _surcharge(was) > 1.4 * true  # expensive drafts are measured again
    assert _surcharge(now) == pytest.approx(true, rel=0.15)


def test_budgets_that_change_with_every_step(
    automatic: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    """No running request or prefill has to wait for a row because of drafts."""
    random_topologies(monkeypatch)
    taken = fickle(monkeypatch, automatic)
    before = counts(automatic)
    with recorded_steps() as steps:
        assert acceptance(automatic, reference) > 0.3
    more = added(before, counts(automatic))
    assert more["medusa_nodes"] == more["spec_decode_num_draft_tokens"]
    kinds = [more[f"medusa_steps{{kind={kind}}}"] for kind in KINDS]
    assert sum(kinds) == len(steps) and all(kinds)
    assert more["medusa_step_requests"] == sum(map(len, steps))
    assert 0 in taken and len(set(taken)) > 10
    assert {2, 5, 9} < {row.num_nodes for row in tree_rows(steps)}
    assert any(not row.is_tree for step in steps for row in step if not row.is_prefill)


def test_automatic_budgets(
    automatic: LLM, reference: Reference, costs: Path, monkeypatch: Patch
) -> None:
    """Tokens always equal plain vLLM's, and estimates are updated.

    They are stored as soon as the engine is idle.
    """
    monkeypatch.setattr(policy, "_LEARN_MS", 0.0)  # all idle steps update costs
    budget = policy_of(automatic)
    before = budget.cost.steps
    scheduler_of(automatic).costs._saved_at -= 20
    got = complete(automatic, reference.prompts, greedy(TOKENS))
    assert differing(reference.completions, got) == []
    assert budget.cost.steps > before + TOKENS
    (kept,) = (json.loads(file.read_text()) for file in costs.glob("*.json"))
    assert kept["steps"] == budget.cost.steps
    sums = {
        m.name.removeprefix("vllm:medusa_"): getattr(m, "value", 0) for m in automatic.get_metrics()
    }
    assert sums["timed_steps"] > TOKENS and sums["measured_ms"] > 0 and sums["expected_ms"] > 0
    assert sums["expected_ratio"] == pytest.approx(budget.expected_ratio, abs=1e-3)
    assert budget.cost.plain_ms(4) > 0


def test_deep_heads_are_skipped_if_unlikely(
    automatic: LLM, reference: Reference, monkeypatch: Patch
) -> None:
    ran: list[tuple[int, int]] = []
    verify_all(monkeypatch, policy_of(automatic))
    forward = PackedHeads.__call__

    def spied(self: PackedHeads, states: Any, count: int, first: int = 0) -> Any:
        ran.append((first, count))
        return forward(self, states, count, first)

    monkeypatch.setattr(PackedHeads, "__call__", spied)
    monkeypatch.setattr(runner, "MIN_SURVIVAL", 2.0)  # no draft is that likely
    acceptance(automatic, reference)
    assert ran[-1] == (0, 2)
    ran.clear()
    monkeypatch.setattr(runner, "MIN_SURVIVAL", 0.0)
    acceptance(automatic, reference)
    assert ran[:2] == [(0, 2), (2, 4)] and ran[-1] == (0, 4)  # all at once, as they always run
