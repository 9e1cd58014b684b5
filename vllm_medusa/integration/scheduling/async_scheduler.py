"""`TreeScheduler` for asynchronous scheduling, where vLLM schedules a step ahead.

Drafts stay on the device and can't be reduced to the best ones: every request that decodes gets
the same number, which is fixed when the step that drafts them is scheduled. Their survivals arrive
with the output of the step that verified them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_medusa.budget.policy import AutoBudget
from vllm_medusa.integration.drafters.draft_messages import Draft
from vllm_medusa.integration.scheduling.scheduler import TreeScheduler, max_draft_tokens


class TreeAsyncScheduler(TreeScheduler, AsyncScheduler):
    """`TreeScheduler` for async scheduling: vLLM schedules a step ahead."""

    ahead = True

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Record the survivals of the step's drafts, which arrive with its output."""
        received: Any = getattr(model_runner_output, "tree_survival", None) or ([], [])
        names, log_survival = received
        copies = getattr(model_runner_output, "tree_copies", None)
        for place, name in enumerate(names):
            request, row = self.requests.get(name), log_survival[place]
            if request is None:
                continue
            draft = self.pending[name] = self._draft_of(name) or Draft([], request=request)
            draft.survival = np.exp(row[np.isfinite(row)]).tolist()  # of a prefix
            draft.limit = self._limit_of_last
            if copies is not None:
                tokens, sources = (part[place, : len(draft.survival)].tolist() for part in copies)
                draft.token_ids, draft.copied = tokens, sources
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.policy is not None:
            count = self._even_count() if scheduler_output.num_scheduled_tokens else 0
            scheduler_output.num_spec_tokens_to_schedule = count
        self._report.chosen = 0
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.is_prefill_chunk:
                continue
            if self.policy is not None:
                # otherwise the next step gives it at most one token
                useful = request.max_tokens - request.num_output_tokens > 2
                request.spec_token_ids = [-1] * (count if useful else 0)
            if (own := max_draft_tokens(request)) is not None:
                request.spec_token_ids = request.spec_token_ids[:own]
            self._report.chosen += len(request.spec_token_ids)

    def _even_count(self) -> int:
        """Number of drafts per running request in the next step."""
        assert self.policy is not None
        requests = len(self.running)
        room, prefill = self._room()
        maximum = min(self.max_drafts, room // max(requests, 1), self._max_allowed())
        if not maximum:
            return 0
        count = min(maximum, self.policy.limit(requests, requests * maximum))
        if count and prefill and isinstance(self.policy, AutoBudget):
            return count if self.policy.pays_beside_prefill(count, requests) else 0
        return count


def tree_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> TreeScheduler:
    """Create the scheduler for the engine's scheduling mode, which vLLM decides last."""
    ahead = vllm_config.scheduler_config.async_scheduling
    kind = TreeAsyncScheduler if ahead else TreeScheduler
    return kind(vllm_config, *args, **kwargs)
