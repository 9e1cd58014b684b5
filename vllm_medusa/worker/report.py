"""What the scheduler of dynamic trees tells the front end of its steps, which counts it.

vLLM sends its own numbers from the engine core to the front end with every step, as msgpack of the
fields it declares: what a subclass adds doesn't arrive. One of them is a list of whole numbers that
nobody reads and that means nothing for trees; a report goes in its place.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

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
        """Say how long a step took, and how long it was expected to take."""
        self.timed += 1
        self.measured_us += round(1e3 * ms)
        self.expected_us += round(1e3 * expected)

    def put_into(self, stats: SpecDecodingStats) -> None:
        """Put the report into vLLM's numbers of a step."""
        stats.num_draft_tokens_per_pos = [_MARK, *astuple(self)]

    @classmethod
    def of(cls, stats: SpecDecodingStats) -> StepReport | None:
        """Read what `put_into` put there; None: nothing."""
        mark, *numbers = stats.num_draft_tokens_per_pos or [0]
        return cls(*numbers) if mark == _MARK and len(numbers) == len(fields(cls)) else None


_COUNTERS = {  # field of `StepReport` -> name, what it counts, divided by
    "requests": ("step_requests", "Requests of all steps together.", 1),
    "nodes": ("nodes", "Draft nodes verified; also of requests that had ended meanwhile.", 1),
    "copied": ("lookup_accepted_tokens", "Accepted draft tokens that lookup alone proposed.", 1),
    "timed": ("timed_steps", "Steps that step costs were learned from.", 1),
    "measured_us": ("measured_ms", "Milliseconds that the timed steps took.", 1e3),
    "expected_us": ("expected_ms", "Milliseconds that the timed steps should have taken.", 1e3),
}
_GAUGES = {
    "chosen": ("budget_nodes", "Draft nodes chosen for the latest step.", 1),
    "ratio": (
        "expected_ratio",
        "Expected speed if all drafted, against plain steps; below 1 steps are plain.",
        1e3,
    ),
}
_TIMED = {"timed", "measured_us", "expected_us", "ratio"}  # where step costs are learned


class StepCounters:
    """Prometheus metrics of `StepReport`; their names begin with ``vllm:medusa_``."""

    def __init__(
        self,
        counter: Any,
        gauge: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        timed: bool,
        copies: bool = False,
    ) -> None:
        """Register them.

        Args:
            counter: the class of counters.
            gauge: the class of gauges.
            labelnames: of every metric.
            per_engine_labelvalues: by the engine's index.
            timed: whether step costs are learned.
            copies: whether there is lookup.

        """
        left_out = (set() if timed else _TIMED) | (set() if copies else {"copied"})
        kinds = counter(
            name="vllm:medusa_steps",
            documentation="Steps by kind: tree (verified draft nodes), prefill (did more than "
            "decode), heads (only drafted), plain.",
            labelnames=[*labelnames, "kind"],
        )
        self._kinds = {
            engine: {kind: kinds.labels(*values, kind) for kind in KINDS}
            for engine, values in per_engine_labelvalues.items()
        }

        def made(cls: Any, described: dict[str, tuple[str, str, float]], **more: Any) -> Any:
            for field, (name, text, unit) in described.items():
                if field not in left_out:
                    metric = cls(
                        name=f"vllm:medusa_{name}",
                        documentation=text,
                        labelnames=labelnames,
                        **more,
                    )
                    for engine, values in per_engine_labelvalues.items():
                        yield engine, field, metric.labels(*values), unit

        self._counters = list(made(counter, _COUNTERS))
        self._gauges = list(made(gauge, _GAUGES, multiprocess_mode="mostrecent"))

    def observe(self, report: StepReport, engine_idx: int) -> None:
        """Count what is reported."""
        for kind, metric in self._kinds[engine_idx].items():
            metric.inc(getattr(report, kind))
        for engine, field, metric, unit in self._counters:
            if engine == engine_idx:
                metric.inc(getattr(report, field) / unit)
        for engine, field, metric, unit in self._gauges:
            if engine == engine_idx:
                metric.set(getattr(report, field) / unit)
