"""vLLM's schedulers, with what they tell of a request counted by depth.

A step accepts a path of the tree, so a histogram of accepted tokens has a place for each depth and
one for none; vLLM's has one for each draft token, which is one for each node.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request

from vllm_medusa.worker.compat import uses_v2_runner
from vllm_medusa.worker.options import EngineOptions


class DepthScheduler(Scheduler):
    """Schedules as vLLM does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = EngineOptions.of(self.vllm_config)
        self._depth = options.depth
        self._drafted_depth = min(options.depth, options.tree.max_depth)  # without lookup
        # Runs that a grammar forces may be deeper, where a step takes trees of any depth.
        self._depth_of_runs = self._drafted_depth
        if options.budget is not None and not uses_v2_runner(self.vllm_config.parallel_config):
            self._depth_of_runs = options.tree.num_draft_tokens

    def add_request(self, request: Request) -> None:
        """Take in a request whose steps are counted by depth, if they are counted."""
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            runs = self._depth_of_runs if request.use_structured_output else 0
            depth = max(self._depth, runs)
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(depth)
