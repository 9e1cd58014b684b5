"""Adapts vLLM's draft metrics and log to trees, so that they mean the same as for chains.

A step accepts a path: the i-th accepted token has depth i, so the number of positions is the
depth of the tree; vLLM would have one per draft token, i.e. per node. Draft tokens are still the
number of verified nodes, because that is their cost.

The scheduler of dynamic trees reports statistics of its steps. vLLM sends its own statistics from
the engine core to the front end as msgpack of declared fields, so the report replaces
one of them: an unused list of integers that is meaningless for trees.

An engine's metrics are removed from Prometheus' process-wide registry when another engine
registers its own. Each engine with trees keeps its own, so that `LLM.get_metrics` finds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_medusa.integration.overrides import override
from vllm_medusa.integration.startup.options import TreeSettings, has_trees

_MARK = -1  # first in the list; vLLM's own starts with a count
KINDS = ("tree", "prefill", "heads", "plain")


@dataclass
class StepReport:
    """The steps since the last report, as integers, and the latest decision."""

    tree: int = 0  # steps that verified draft nodes
    prefill: int = 0  # others with prefill
    heads: int = 0  # others whose heads drafted
    plain: int = 0  # all others
    requests: int = 0  # total over all steps
    nodes: int = 0  # verified in all steps
    timed: int = 0  # steps used to update step costs
    measured_us: int = 0  # measured time of the timed steps
    expected_us: int = 0  # expected time of the timed steps
    chosen: int = 0  # nodes chosen for the latest step
    copied: int = 0  # accepted draft tokens proposed only by lookup
    ratio: int = 0  # expected speed with drafts relative to plain steps, in thousandths

    def add(self, requests: int, nodes: int, *, prefill: bool, drafted: bool) -> None:
        """Count a step."""
        kind = "tree" if nodes else "prefill" if prefill else "heads" if drafted else "plain"
        setattr(self, kind, getattr(self, kind) + 1)
        self.requests += requests
        self.nodes += nodes

    def time(self, ms: float, expected: float) -> None:
        """Record the measured and the expected time of a step."""
        self.timed += 1
        self.measured_us += round(1e3 * ms)
        self.expected_us += round(1e3 * expected)

    def put_into(self, stats: SpecDecodingStats) -> None:
        """Store the report in vLLM's statistics of a step."""
        stats.num_draft_tokens_per_pos = [_MARK, *vars(self).values()]

    @classmethod
    def of(cls, stats: SpecDecodingStats) -> StepReport | None:
        """Read what `put_into` stored; None if the statistics hold no report."""
        mark, *numbers = stats.num_draft_tokens_per_pos or [0]
        return cls(*numbers) if mark == _MARK else None


class _Metric(NamedTuple):
    field: str  # of `StepReport`
    name: str
    text: str
    divisor: float = 1
    is_gauge: bool = False
    timed: bool = False  # only if step costs are measured


_METRICS = (
    _Metric("requests", "step_requests", "Total requests over all steps."),
    _Metric("nodes", "nodes", "Draft nodes verified, including those of requests that have ended."),
    _Metric("copied", "lookup_accepted_tokens", "Accepted draft tokens proposed only by lookup."),
    _Metric("timed", "timed_steps", "Steps used to update step costs.", timed=True),
    _Metric("measured_us", "measured_ms", "Measured time of the timed steps.", 1e3, timed=True),
    _Metric("expected_us", "expected_ms", "Expected time of the timed steps.", 1e3, timed=True),
    _Metric("chosen", "budget_nodes", "Draft nodes chosen for the latest step.", is_gauge=True),
    _Metric("ratio", "expected_ratio", "Expected speed with drafts relative to plain steps. "
            "Drafting starts above 1.06; it stops at 1.02, or if steps prove slower.", 1e3,
            is_gauge=True, timed=True),
)  # fmt: skip


def install() -> None:
    """Count by depth in the front end, which has the registry and the log."""
    override(PrometheusStatLogger, "__init__", _prometheus)
    override(LoggingStatLogger, "__init__", _logging)
    override(LLMEngine, "get_metrics", _get_metrics)


def _prometheus(
    original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    is_ours = has_trees(vllm_config.speculative_config)
    if is_ours:  # shadows vLLM's class attribute in this object
        self._spec_decoding_cls = partial(TreeCounters, self, vllm_config)
    original(self, vllm_config, *args, **kwargs)
    if is_ours:
        self.medusa_registry = _registered_by_vllm()


def _registered_by_vllm() -> CollectorRegistry:
    """Metrics of vLLM in the process's registry: those of the engine started last."""
    found = CollectorRegistry()
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            found.register(collector)
    return found


def _get_metrics(original: Callable[..., Any], self: Any) -> Any:
    loggers = self.logger_manager.stat_loggers if self.logger_manager is not None else ()
    for logger in loggers:
        if (registry := getattr(logger, "medusa_registry", None)) is not None:
            with patch.object(reader, "REGISTRY", registry):
                return original(self)
    return original(self)


class TreeCounters:
    """vLLM's counters with one position per depth, and those of a `StepReport`."""

    def __init__(
        self,
        logger: PrometheusStatLogger,
        vllm_config: Any,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        **more: Any,
    ) -> None:
        """Register them; the last four arguments are those of vLLM's own counters.

        The names of the report's metrics start with ``vllm:medusa_``.
        """
        options = TreeSettings.of(vllm_config)
        config = copy.copy(speculative_config)
        config.num_speculative_tokens = options.depth
        stock = type(logger)._spec_decoding_cls
        self._stock = stock(config, labelnames, per_engine_labelvalues, **more)
        # by engine: report field, function that takes its value, divisor
        self._updates: dict[int, list[tuple[str, Callable[[float], None], float]]] = {}
        if options.budget is None:
            return
        self._updates = {engine: [] for engine in per_engine_labelvalues}
        steps = logger._counter_cls(
            name="vllm:medusa_steps",
            documentation="Steps by kind: tree (verified draft nodes), prefill (more than "
            "decode), heads (only drafted), plain.",
            labelnames=[*labelnames, "kind"],
        )
        for engine, values in per_engine_labelvalues.items():
            self._updates[engine] += [(kind, steps.labels(*values, kind).inc, 1) for kind in KINDS]
        for each in _METRICS:
            if each.timed and isinstance(options.budget, int):
                continue
            if each.field == "copied" and not options.lookup:
                continue
            make = logger._gauge_cls if each.is_gauge else logger._counter_cls
            mode = {"multiprocess_mode": "mostrecent"} if each.is_gauge else {}
            name = f"vllm:medusa_{each.name}"
            metric = make(name=name, documentation=each.text, labelnames=labelnames, **mode)
            for engine, values in per_engine_labelvalues.items():
                own = metric.labels(*values)
                update = own.set if each.is_gauge else own.inc
                self._updates[engine].append((each.field, update, each.divisor))

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count a step."""
        if spec_decoding_stats.num_drafts:  # skip empty updates, which are slow
            self._stock.observe(spec_decoding_stats, engine_idx)
        report = StepReport.of(spec_decoding_stats)
        if report is not None:
            for field, update, divisor in self._updates.get(engine_idx, ()):
                update(getattr(report, field) / divisor)


def _logging(
    original: Callable[..., None], self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    original(self, vllm_config, *args, **kwargs)
    if has_trees(vllm_config.speculative_config):
        self.spec_decoding_logging = DepthLogging(TreeSettings.of(vllm_config).depth)


class DepthLogging(SpecDecodingLogging):
    """vLLM's log line: positions are depths, and drafted tokens are nodes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Record a step's statistics, up to the max depth; steps without drafts have none."""
        if spec_decoding_stats.num_drafts:
            places = spec_decoding_stats.num_accepted_tokens_per_pos[: self.depth]
            super().observe(replace(spec_decoding_stats, num_accepted_tokens_per_pos=places))
