"""What vLLM's metrics and log say of drafts, so that they mean for trees what they do for chains.

A step accepts a path: the i-th accepted token has depth i, so there are as many positions as the
tree is deep. vLLM counts one for each draft token, which is one for each node. Draft tokens stay
what they are, nodes that were verified: that is what they cost.

The scheduler of dynamic trees reports what its steps were like. vLLM sends its own numbers from
the engine core to the front end as msgpack of the fields it declares, so the report takes the place
of one of them: a list of whole numbers that nobody reads and that means nothing for trees.

An engine's metrics leave Prometheus' registry, which is the process's, as soon as another engine
registers its own. Each engine with trees remembers its own, so that `LLM.get_metrics` finds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_medusa.worker.options import EngineOptions, is_medusa
from vllm_medusa.worker.overrides import override

_MARK = -1  # first in the list; vLLM's own begins with a count
KINDS = ("tree", "prefill", "heads", "plain")


@dataclass
class StepReport:
    """The steps since the last report, as whole numbers, and what was decided last."""

    tree: int = 0  # steps that verified draft nodes
    prefill: int = 0  # others that did more than decode
    heads: int = 0  # others at whose end heads drafted
    plain: int = 0  # all others
    requests: int = 0  # of all steps together
    nodes: int = 0  # verified by all steps together
    timed: int = 0  # steps that step costs were learned from
    measured_us: int = 0  # of these
    expected_us: int = 0  # of these
    chosen: int = 0  # nodes that the latest step was to verify
    copied: int = 0  # accepted draft tokens that lookup alone proposed
    ratio: int = 0  # expected speed with drafts against plain steps, in thousandths

    def add(self, requests: int, nodes: int, *, prefill: bool, drafted: bool) -> None:
        """Count a step."""
        kind = "tree" if nodes else "prefill" if prefill else "heads" if drafted else "plain"
        setattr(self, kind, getattr(self, kind) + 1)
        self.requests += requests
        self.nodes += nodes

    def time(self, ms: float, expected: float) -> None:
        """Take in how long a step took, and how long it was expected to take."""
        self.timed += 1
        self.measured_us += round(1e3 * ms)
        self.expected_us += round(1e3 * expected)

    def put_into(self, stats: SpecDecodingStats) -> None:
        """Put the report into vLLM's numbers of a step."""
        stats.num_draft_tokens_per_pos = [_MARK, *vars(self).values()]

    @classmethod
    def of(cls, stats: SpecDecodingStats) -> StepReport | None:
        """Read what `put_into` put there; None: nothing."""
        mark, *numbers = stats.num_draft_tokens_per_pos or [0]
        return cls(*numbers) if mark == _MARK and len(numbers) == _NUM_FIELDS else None


_NUM_FIELDS = len(fields(StepReport))
_METRICS = {  # field of `StepReport` -> name, what it counts, divided by
    "requests": ("step_requests", "Requests of all steps together.", 1),
    "nodes": ("nodes", "Draft nodes verified; also of requests that had ended meanwhile.", 1),
    "copied": ("lookup_accepted_tokens", "Accepted draft tokens that lookup alone proposed.", 1),
    "timed": ("timed_steps", "Steps that step costs were learned from.", 1),
    "measured_us": ("measured_ms", "Milliseconds that the timed steps took.", 1e3),
    "expected_us": ("expected_ms", "Milliseconds that the timed steps should have taken.", 1e3),
    "chosen": ("budget_nodes", "Draft nodes chosen for the latest step.", 1),
    "ratio": (
        "expected_ratio",
        "Expected speed if all drafted, against plain steps; below 1 steps are plain.",
        1e3,
    ),
}
_GAUGES = {"chosen", "ratio"}
_TIMED = {"timed", "measured_us", "expected_us", "ratio"}  # where step costs are learned


def install_metrics() -> None:
    """Count by depth in the front end, which has the registry and the log."""
    override(PrometheusStatLogger, "__init__", _prometheus)
    override(LoggingStatLogger, "__init__", _logging)
    override(LLMEngine, "get_metrics", _metrics)


def _prometheus(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_medusa(vllm_config.speculative_config):
            return original(self, vllm_config, *args, **kwargs)
        # a class attribute of vLLM's, for this one object
        self._spec_decoding_cls = partial(TreeCounters, self, vllm_config)
        original(self, vllm_config, *args, **kwargs)
        self.medusa_registry = _registered_by_vllm()
        return None

    return __init__


def _registered_by_vllm() -> CollectorRegistry:
    """What vLLM has in the process's registry now: the metrics of the engine started last."""
    found = CollectorRegistry()
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            found.register(collector)
    return found


def _metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics(self: Any) -> Any:
        loggers = self.logger_manager.stat_loggers if self.logger_manager is not None else ()
        for logger in loggers:
            if (registry := getattr(logger, "medusa_registry", None)) is not None:
                with patch.object(reader, "REGISTRY", registry):
                    return original(self)
        return original(self)

    return get_metrics


class TreeCounters:
    """vLLM's counters with one position for each depth, and those of a `StepReport`."""

    def __init__(
        self,
        logger: PrometheusStatLogger,
        vllm_config: Any,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        **more: Any,
    ) -> None:
        """Register them; the last four arguments are what vLLM gives its own counters.

        The names of the report's metrics begin with ``vllm:medusa_``.
        """
        options = EngineOptions.of(vllm_config)
        config = copy.copy(speculative_config)
        config.num_speculative_tokens = options.depth
        stock = type(logger)._spec_decoding_cls
        self._stock = stock(config, labelnames, per_engine_labelvalues, **more)
        # by engine: field of the report, what takes its value, divided by
        self._updates: dict[int, list[tuple[str, Callable[[float], None], float]]] = {}
        if options.budget is None:
            return
        steps = logger._counter_cls(
            name="vllm:medusa_steps",
            documentation="Steps by kind: tree (verified draft nodes), prefill (did more than "
            "decode), heads (only drafted), plain.",
            labelnames=[*labelnames, "kind"],
        )
        left_out = set() if options.lookup else {"copied"}
        left_out |= _TIMED if isinstance(options.budget, int) else set()
        metrics = {}
        for field, (name, text, _) in _METRICS.items():
            if field not in left_out:
                gauge = {"multiprocess_mode": "mostrecent"} if field in _GAUGES else {}
                make = logger._gauge_cls if field in _GAUGES else logger._counter_cls
                metrics[field] = make(
                    name=f"vllm:medusa_{name}", documentation=text, labelnames=labelnames, **gauge
                )
        for engine, values in per_engine_labelvalues.items():
            updates = self._updates.setdefault(engine, [])
            for kind in KINDS:
                updates.append((kind, steps.labels(*values, kind).inc, 1))
            for field, metric in metrics.items():
                own = metric.labels(*values)
                update = own.set if field in _GAUGES else own.inc
                updates.append((field, update, _METRICS[field][2]))

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Count a step."""
        if spec_decoding_stats.num_drafts:  # else it counts nothing, slowly
            self._stock.observe(spec_decoding_stats, engine_idx)
        report = StepReport.of(spec_decoding_stats)
        if report is not None:
            for field, update, divisor in self._updates.get(engine_idx, ()):
                update(getattr(report, field) / divisor)


def _logging(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if is_medusa(vllm_config.speculative_config):
            self.spec_decoding_logging = DepthLogging(EngineOptions.of(vllm_config).depth)

    return __init__


class DepthLogging(SpecDecodingLogging):
    """vLLM's line of the log: positions are depths, and drafted tokens are nodes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Take in a step's numbers of the depths that there are; steps without drafts have none."""
        if spec_decoding_stats.num_drafts:
            places = spec_decoding_stats.num_accepted_tokens_per_pos[: self.depth]
            super().observe(replace(spec_decoding_stats, num_accepted_tokens_per_pos=places))
