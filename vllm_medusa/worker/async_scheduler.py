"""The same budget where vLLM schedules a step ahead: counts are said before there are drafts.

What was drafted stays on the device, so a step can't be cut to its best nodes: every request that
decodes gets the same number of drafts, said together with the step at whose end they are drafted.
What they are worth by their place is known from earlier ones: survivals come to the scheduler with
the output of the step that verified them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_medusa.budget.even import EvenBudget, EvenOutlook
from vllm_medusa.worker.scheduler import Step, TreeScheduler, worth_of


class TreeAsyncScheduler(TreeScheduler, AsyncScheduler):
    """Schedules as vLLM's asynchronous scheduler does, with the number of drafts that pays."""

    outlook, decides = EvenOutlook, EvenBudget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Counts are said in `_update_after_schedule`, which knows what the step leaves to do.
        self.dynamic_sd_lookup = [0] * (1 + self.max_num_running_reqs)  # type: ignore[assignment]
        self._in_flight: deque[Step | None] = deque()
        self._ended_at = 0.0  # seconds, when the last output came
        self._even = True
        self._heads_ran = 0  # `Step.limit` of the step whose output came last

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step; its time is taken when its output comes."""
        output = super().schedule(*args, **kwargs)
        self._in_flight.append(self._step)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Learn from the step whose output this is; the rest is vLLM's."""
        self._step = self._in_flight.popleft()
        told = getattr(model_runner_output, "tree_survival", None)
        self._survival = dict(zip(told[0], worth_of(told[1]), strict=True)) if told else {}
        copies = getattr(model_runner_output, "tree_copies", None)
        self._proposed_by, self._told_drafts = {}, {}
        for name, tokens, by in zip(told[0], *copies, strict=True) if told and copies else ():
            if by.any():
                self._proposed_by[name] = by[: len(self._survival[name])].tolist()
                self._told_drafts[name] = tokens.tolist()
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        count = self._even_count() if scheduler_output.num_scheduled_tokens else 0
        scheduler_output.num_spec_tokens_to_schedule = count
        self._report.chosen = 0
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if not request.is_prefill_chunk:
                request.spec_token_ids = [-1] * (count if _may_use_drafts(request) else 0)
                self._report.chosen += len(request.spec_token_ids)

    def _even_count(self) -> int:
        """Drafts of each running request in the next step."""
        free, has_prefill = self._next_rows()
        requests, budget = len(self.running), self.budget
        most = min(self._most, free // max(requests, 1))
        if budget is None or most == 0:
            return most
        self.expect_kinds(budget)
        return 0 if has_prefill else min(most, budget.draft_next(requests, requests * most))

    def _ended(self, step: Step) -> None:
        """Time a step from the output before it: the device runs one behind the other.

        An output comes before the heads run, so the time is that of the heads of the step before.
        """
        now = time.perf_counter()
        started, self._ended_at = max(step.started, self._ended_at), now
        step.limit, self._heads_ran = self._heads_ran, step.limit
        self._learn_cost(step, 1e3 * (now - started))
        self._keep_costs_at_times(now)


def _may_use_drafts(request: Request) -> bool:
    """Whether the step after the one just scheduled may give it more than one token."""
    return request.max_tokens - request.num_output_tokens > 2
