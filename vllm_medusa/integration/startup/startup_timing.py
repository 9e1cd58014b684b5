"""Measure step times at start-up: dummy requests run through our scheduler and the runner.

So the cost of drafts is known before the first request. Costs measured under other load
overestimate the cost of drafts, and while drafting is off this is corrected only slowly. The
duration is limited: costs are stored for `TreeScheduler`, and later engines of the same kind only
update them, in less time.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vllm.distributed import get_tp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_medusa.budget.expected_acceptance import ExpectedAcceptance
from vllm_medusa.budget.policy import AutoBudget
from vllm_medusa.integration import compat
from vllm_medusa.integration.drafters.draft_messages import Draft
from vllm_medusa.integration.scheduling.scheduler import TreeScheduler
from vllm_medusa.integration.startup.options import TreeSettings

SECONDS = 10.0  # no step starts later; the slow first step is not counted
AGAIN = 0.3  # fraction of SECONDS if costs are known from an earlier start
_PROMPT = (0, 1)
# (requests, draft nodes of each), coarse first. Each number of nodes is run in two consecutive
# steps, because the first step with a new number of rows is slow, and so is the first one with a
# tree after plain steps, and vice versa. -n: n nodes are drafted and none is verified, which
# separates the time of drafting from that of rows.
_PLAN = (
    (1, (0, 4, 2, 8)),
    (4, (0, 2, 4)),
    (1, (-1, -4, -16)),
    (4, (-1, -4)),
    (16, (0, 1, 2)),
    (1, (4, 1, 3, 6, 12, 5, 16, 31)),
    (64, (1,)),
    (4, (4, 1, 3, 7, 15)),
    (2, (0, 2, 1, 4, 3, 7, 15)),
    (8, (0, 2, 1, 3, 7)),
    (16, (4, 3)),
    (32, (0, 1, 2)),
)
_FEW, _REPEATS = 2, 3  # up to `_FEW` requests, steps are timed `_REPEATS` times


class _ScriptedBudget(AutoBudget):
    """Verifies a given number of nodes, and records the times."""

    nodes = 0  # per request in the next step, as in `_PLAN`
    learns = False

    def limit(self, requests: int, room: int, full: float = 0.0) -> int:
        return min(abs(self.nodes), self.max_drafts)

    def counts(
        self, drafts: Sequence[Any], requests: int, room: int, *, prefill: bool = False
    ) -> list[int]:
        nodes = min(max(self.nodes, 0), room // max(requests, 1))
        return [min(nodes, len(draft.token_ids)) for draft in drafts]

    def observe(self, rows: int, requests: int, limit: int, ms: float, tokens: float = 0.0) -> None:
        if self.learns:
            self.cost.observe(rows, requests, int(self.planner.work(limit)), ms)


class _TimingScheduler(TreeScheduler):
    """The scheduler with a scripted budget; stores nothing."""

    policy: _ScriptedBudget

    def new_policy(self) -> _ScriptedBudget:
        known = super().new_policy()
        assert isinstance(known, AutoBudget)
        self.known_steps = known.cost.steps
        top_limit = known.planner.top_limit
        return _ScriptedBudget(known.cost, ExpectedAcceptance(), self.max_drafts, top_limit)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Use chains of arbitrary tokens as drafts if there are no heads."""
        if self.options.tree.max_depth:
            super().update_draft_token_ids(draft_token_ids)
            return
        nodes = min(self.policy.nodes, self._room()[0] // max(len(self.running), 1))
        for request in map(self.requests.get, draft_token_ids.req_ids):
            if request is not None and not request.is_prefill_chunk:
                draft = Draft([], request=request, token_ids=[0] * nodes)
                draft.parents = list(range(nodes))
                self.pending[request.request_id] = draft
                request.spec_token_ids = draft.token_ids

    def save_costs(self, min_seconds: float) -> None:
        pass


def measure_step_costs(worker: Any) -> None:
    """Time steps with a worker whose model and KV cache are ready; store the times.

    Every rank runs the same steps. Skipped for fixed budgets; shorter if costs are known.
    """
    options = TreeSettings.of(worker.vllm_config)
    if options.budget is None or isinstance(options.budget, int):
        return
    scheduler = _scheduler(worker)
    known_steps = scheduler.known_steps
    seconds = SECONDS if _agreed(not known_steps) else AGAIN * SECONDS
    _run(worker, scheduler, 1, (), math.inf)
    begun = time.perf_counter()
    plan = [run for run in _PLAN if run[0] <= scheduler.max_num_running_reqs]
    plan += [run for run in plan if run[0] <= _FEW] * (_REPEATS - 1)
    for requests, nodes in plan:
        if not _run(worker, scheduler, requests, nodes, begun + seconds):
            break
    cost = scheduler.policy.cost
    if not cost.steps or get_tp_group().rank_in_group:
        return
    compat.logger.info(
        "Medusa timed %d steps in %.1f s: one row takes %.1f ms, eight of one request %.1f ms.",
        cost.steps - known_steps,
        time.perf_counter() - begun,
        cost.ms(1, 1, 0),
        cost.ms(8, 1, scheduler.policy.planner.work(7)),
    )
    if problem := scheduler.costs.save(cost):
        compat.logger.warning("Step costs can't be stored: %s", problem)


def _scheduler(worker: Any) -> _TimingScheduler:
    """A scheduler for the engine's config, without external connections."""
    kv_cache_config = generate_scheduler_kv_cache_config([worker.model_runner.kv_cache_config])
    config = copy.copy(worker.vllm_config)
    config.kv_events_config = None
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = False
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return _TimingScheduler(
        config,
        kv_cache_config,
        StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )


def _agreed(value: bool) -> bool:
    """The first rank's value, on all ranks."""
    group = get_tp_group()
    return value if group.world_size == 1 else bool(group.broadcast_object(value, src=0))


def _run(
    worker: Any, scheduler: _TimingScheduler, requests: int, nodes: tuple[int, ...], end: float
) -> bool:
    """Run and time the steps of an entry of `_PLAN`; returns False when time is up."""
    script = scheduler.policy
    names = [f"medusa-timing-{index}" for index in range(requests)]
    maximum = scheduler.max_model_len - len(_PROMPT)
    if maximum < 1:
        return False  # nothing to decode
    # seeds: random as for user requests, but equal on all ranks
    for index, name in enumerate(names):
        params = SamplingParams(max_tokens=maximum, ignore_eos=True, seed=index)
        scheduler.add_request(Request(name, list(_PROMPT), params, None))
    script.learns, in_time = False, True
    while scheduler.waiting and in_time:  # prefill
        script.nodes = 0
        _step(worker, scheduler)
        in_time = _agreed(time.perf_counter() < end)
    before, is_timed = None, False
    repeated = [count for count in nodes for _ in range(2 if count >= 0 else 3)]
    for now, script.nodes in pairwise((*repeated, 0)):
        if not in_time or not scheduler.running:
            break
        script.learns = is_timed  # the time of a step is known when the next one starts
        _step(worker, scheduler)
        is_timed = before == now and (now >= 0 or script.nodes == now)
        before = now
        in_time = _agreed(time.perf_counter() < end)
    scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    script.learns, script.nodes = is_timed, 0
    _step(worker, scheduler)  # removes them from the runner
    return in_time


def _step(worker: Any, scheduler: _TimingScheduler) -> None:
    """One step, as in vLLM's engine core (v1/engine/core.py, `step` and `post_step`)."""
    plan = scheduler.schedule()
    output = worker.execute_model(plan)
    if output is None:
        output = worker.sample_tokens(None)
    if hasattr(output, "get_output"):  # from a runner that does not wait for its device
        output = output.get_output()
    scheduler.update_from_output(plan, output)
    drafts = worker.take_draft_token_ids() if plan.total_num_scheduled_tokens else None
    if drafts is not None:
        scheduler.update_draft_token_ids(drafts)
