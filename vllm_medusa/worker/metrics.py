"""What vLLM's metrics and log say of drafts, so that they mean for trees what they do for chains.

A step accepts a path: the i-th accepted token has depth i, so there are as many positions as the
tree is deep. vLLM counts one for each draft token, which is one for each node. Draft tokens stay
what they are, nodes that were verified: that is what they cost.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_medusa.worker import compat
from vllm_medusa.worker.options import EngineOptions, is_medusa
from vllm_medusa.worker.overrides import override
from vllm_medusa.worker.report import StepCounters, StepReport


def install_metrics() -> None:
    """Count by depth in the front end, which has the registry and the log."""
    override(PrometheusStatLogger, "__init__", _prometheus)
    override(LoggingStatLogger, "__init__", _logging)


def _prometheus(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_medusa(vllm_config.speculative_config):
            # a class attribute of vLLM's, for this one object
            self._spec_decoding_cls = partial(TreeCounters, self, vllm_config)
        original(self, vllm_config, *args, **kwargs)

    return __init__


class TreeCounters:
    """vLLM's counters with one position for each depth; of dynamic trees, what steps were like."""

    def __init__(
        self,
        logger: PrometheusStatLogger,
        vllm_config: Any,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        **more: Any,
    ) -> None:
        """Make them.

        Args:
            logger: says which classes counters are made of.
            vllm_config: of the engine.
            speculative_config: this and all that follows is what vLLM gives its own.
            labelnames: of every counter.
            per_engine_labelvalues: by the engine's index.
            **more: whatever else vLLM gives.

        """
        config = copy.copy(speculative_config)
        config.num_speculative_tokens = EngineOptions.of(vllm_config).depth
        stock = type(logger)._spec_decoding_cls
        self._stock = stock(config, labelnames, per_engine_labelvalues, **more)
        self._steps = None
        budget = EngineOptions.of(vllm_config).budget
        if budget is not None:
            classes = logger._counter_cls, logger._gauge_cls
            timed = not isinstance(budget, int)
            self._steps = StepCounters(
                *classes,
                labelnames,
                per_engine_labelvalues,
                timed=timed,
                copies=EngineOptions.of(vllm_config).lookup,
            )

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count a step."""
        self._stock.observe(spec_decoding_stats, engine_idx)
        report = StepReport.of(spec_decoding_stats)
        if report is not None and self._steps is not None:
            self._steps.observe(report, engine_idx)


def _logging(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if is_medusa(vllm_config.speculative_config):
            self.spec_decoding_logging = DepthLogging(EngineOptions.of(vllm_config).depth)

    return __init__


class DepthLogging(SpecDecodingLogging):
    """vLLM's line of the log: positions are depths, and what was drafted are nodes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Take in a step's numbers of the depths that there are; steps without drafts have none."""
        if spec_decoding_stats.num_drafts:
            places = spec_decoding_stats.num_accepted_tokens_per_pos[: self.depth]
            super().observe(replace(spec_decoding_stats, num_accepted_tokens_per_pos=places))

    def log(self, log_fn: Callable[..., None] = compat.logger.info) -> None:
        """Say what was verified and accepted since the last time.

        Of a tree's nodes most can't be accepted, so no rate of them is given.
        """
        if not self.num_drafts:
            return
        trees, accepted = sum(self.num_drafts), sum(self.num_accepted_tokens)
        seconds = max(time.monotonic() - self.last_log_time, 1e-9)
        steps = zip(*self.accepted_tokens_per_pos_lists, strict=True)
        log_fn(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f "
            "tokens/s, Accepted: %d tokens, Trees verified: %d of %.1f draft nodes on average, "
            "Acceptance rate by depth: %s",
            1 + accepted / trees,
            accepted / seconds,
            accepted,
            trees,
            sum(self.num_draft_tokens) / trees,
            ", ".join(f"{sum(depth) / trees:.3f}" for depth in steps),
        )
        self.reset()
