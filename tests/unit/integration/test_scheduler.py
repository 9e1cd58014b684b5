"""The scheduler with a simulated worker: what it schedules, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_medusa.budget.policy import AutoBudget, FixedBudget
from vllm_medusa.integration.drafters.draft_messages import DraftMessage
from vllm_medusa.integration.scheduling.async_scheduler import TreeAsyncScheduler, tree_scheduler
from vllm_medusa.integration.scheduling.scheduler import TreeScheduler

PROMPT = 5
SURVIVAL = (0.9, 0.8, 0.5, 0.2, 0.1, 0.05)
BLOCK, BLOCKS = 16, 200
Make = Callable[..., TreeScheduler]


@pytest.fixture
def make(target: Any, random_heads: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A scheduler with given options of the speculative config."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    envs.disable_envs_cache()

    def made(ahead: bool = False, limits: Any = (), **chosen: Any) -> TreeScheduler:
        """Of requests up to 256 tokens; ``ahead``: asynchronous."""
        speculative = {"method": "medusa", "model": random_heads, **chosen}
        config = EngineArgs(
            str(target), skip_tokenizer_init=True, dtype="float32", max_model_len=256,
            enable_prefix_caching=False, speculative_config=speculative, **dict(limits),
        ).create_engine_config()  # fmt: skip
        config.scheduler_config.async_scheduling = ahead
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        kv_cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        manager = StructuredOutputManager(config)
        return tree_scheduler(
            config, kv_cache, manager, block_size=BLOCK, hash_block_size=BLOCK, log_stats=True
        )

    return made


class Worker:
    """Accepts up to two drafts per request, and drafts the requested number."""

    def __init__(self, scheduler: TreeScheduler) -> None:
        self.scheduler = scheduler
        self.drafted: dict[str, int] = {}
        self.nodes: list[dict[str, int]] = []  # verified nodes of each step
        self.limits: list[int] = []

    def output(self, plan: Any) -> ModelRunnerOutput:
        names = list(plan.num_scheduled_tokens)
        verified = plan.scheduled_spec_decode_tokens
        sampled, drafts = [], {}
        for name in names:
            request, nodes = self.scheduler.requests[name], len(verified.get(name, ()))
            done = request.num_computed_tokens >= request.num_prompt_tokens
            sampled.append([7] * (1 + min(2, nodes)) if done else [])
            if done:
                drafts[name] = min(plan.num_spec_tokens_to_schedule, len(SURVIVAL))
        self.nodes.append({name: len(tokens) for name, tokens in verified.items()})
        self.limits.append(plan.num_spec_tokens_to_schedule)
        output: Any = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        if self.scheduler.ahead and self.drafted:  # survivals of the verified drafts
            worth = np.full((len(self.drafted), len(SURVIVAL)), -np.inf, np.float32)
            for row, count in zip(worth, self.drafted.values(), strict=True):
                row[:count] = np.log(SURVIVAL[:count])
            output.tree_survival = list(self.drafted), worth
        self.drafted = drafts
        return output

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.update_from_output(plan, self.output(plan))
        if not self.scheduler.ahead:
            tokens = [[7] * count for count in self.drafted.values()]
            worth = [list(SURVIVAL[:count]) for count in self.drafted.values()]
            self.scheduler.update_draft_token_ids(DraftMessage(list(self.drafted), tokens, worth))


def run(scheduler: TreeScheduler, requests: int, steps: int) -> Worker:
    worker = Worker(scheduler)
    for index in range(requests):
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        scheduler.add_request(Request(f"r{index}", [3] * PROMPT, params, None))
    for _ in range(steps):
        worker.step()
    return worker


@pytest.mark.parametrize("ahead", [False, True])
def test_a_fixed_budget_is_equal_for_all_requests(make: Make, ahead: bool) -> None:
    scheduler = make(ahead, budget=4)
    assert isinstance(scheduler.policy, FixedBudget)
    worker = run(scheduler, 3, 6)
    assert isinstance(scheduler, TreeAsyncScheduler if ahead else TreeScheduler)
    assert worker.limits[1:] == [4] * 5
    assert worker.nodes[1:] == [{"r0": 4, "r1": 4, "r2": 4}] * 5
    if not ahead:
        assert scheduler.requests["r0"].num_output_tokens == 1 + 5 * 3


@pytest.mark.parametrize("ahead", [False, True])
def test_drafting_stops_at_the_largest_limit_of_a_request(make: Make, ahead: bool) -> None:
    scheduler = make(ahead, budget=4)
    for own in (1, 3):
        extra = {"medusa": {"max_draft_tokens": own}}
        params = SamplingParams(max_tokens=200, ignore_eos=True, extra_args=extra)
        scheduler.add_request(Request(f"r{own}", [3] * PROMPT, params, None))
    worker = run(scheduler, 0, 6)
    assert worker.limits[1:] == [3] * 5
    assert worker.nodes[2:] == [{"r1": 1, "r3": 3}] * 4


def test_no_drafting_without_room_for_the_drafters_entries(make: Make) -> None:
    scheduler = make(budget=4)
    assert scheduler._scratch == 0  # heads need none
    scheduler._scratch = 256 - 26
    worker = run(scheduler, 2, 0)
    tokens = []
    for _ in range(14):
        tokens.append(max(r.num_tokens for r in scheduler.requests.values()))
        worker.step()
    assert tokens[-1] > 26
    assert [limit > 0 for limit in worker.limits] == [number <= 26 for number in tokens]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_automatic_budget_learns_from_steps(make: Make, ahead: bool) -> None:
    scheduler = make(ahead, budget="auto")
    policy = scheduler.policy
    assert isinstance(policy, AutoBudget) and policy.even == ahead
    policy.limit = lambda *_: len(SURVIVAL)  # type: ignore[method-assign]
    policy.counts = lambda drafts, *_, **__: [4] * len(drafts)  # type: ignore[method-assign]
    worker = run(scheduler, 3, 30)
    assert all(set(nodes.values()) == {len(SURVIVAL) if ahead else 4} for nodes in worker.nodes[2:])
    assert policy.cost.steps > 20
    believed = policy.acceptance.ratio[0] * sum(SURVIVAL[: 6 if ahead else 4])
    assert believed == pytest.approx(2.0, rel=0.1)
    assert not policy.acceptance.copies


@pytest.mark.parametrize("maximum", [5, 8])
def test_max_rows_counts_the_requests_themselves(make: Make, maximum: int) -> None:
    scheduler = make(budget={"max_rows": maximum})
    policy: Any = scheduler.policy
    policy.limit = lambda *_: 6
    policy.cost.ms = lambda rows, *_: 1.0 + 0 * np.asarray(rows)  # rows cost nothing
    worker = run(scheduler, 3, 8)
    assert max(3 + sum(nodes.values()) for nodes in worker.nodes) == maximum


def test_the_likeliest_drafts_are_kept_if_rows_are_few(make: Make) -> None:
    """No running request waits for a row because of drafts."""
    scheduler = make(budget=6, limits={"max_num_batched_tokens": 20, "max_num_seqs": 8})
    worker = run(scheduler, 8, 12)
    assert all(len(nodes) + sum(nodes.values()) <= 20 for nodes in worker.nodes)
    assert max(sum(nodes.values()) for nodes in worker.nodes) >= 10
    assert len({r.num_output_tokens > 1 for r in scheduler.running}) == 1


def test_a_reused_request_id_does_not_get_old_drafts(make: Make) -> None:
    scheduler = make(budget=4)
    worker = run(scheduler, 1, 3)
    assert scheduler.pending["r0"].token_ids == [7] * 4
    scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    scheduler.add_request(Request("r0", [3] * PROMPT, params, None))
    worker.drafted = {}
    worker.step()
    assert worker.nodes[-1] == {}
    assert scheduler._draft_of("r0") is not None  # its own draft
