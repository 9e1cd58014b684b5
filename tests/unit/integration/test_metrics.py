"""vLLM's own counters and log for trees, and step counters, without an engine."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from prometheus_client import REGISTRY
from support.triton_steps import TREE, make_config
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_medusa.integration.metrics import StepReport

NODES, DEPTH = TREE.num_draft_tokens, TREE.max_depth  # 6, 3
STEPS = [(6, 3), (6, 0), (4, 1), (6, 1), (2, 2)]  # draft nodes of a request, accepted ones


@pytest.fixture
def config(target, random_heads):
    yield make_config(target, random_heads)
    unregister_vllm_metrics()


def sent(stats):
    """As received from an engine core in another process."""
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))
    parts = MsgpackEncoder().encode(outputs)
    return MsgpackDecoder(EngineCoreOutputs).decode([bytes(part) for part in parts]).scheduler_stats


def record(logger):
    stats = SpecDecodingStats.new(NODES)
    for nodes, accepted in STEPS:
        stats.observe_draft(nodes, accepted)
    logger.record(sent(stats), None)


def counted(config):
    """The output of /metrics and `LLM.get_metrics` after `STEPS`."""
    record(PrometheusStatLogger(config, [0]))
    found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in get_metrics_snapshot()}
    per_pos = found["accepted_tokens_per_pos"].values
    return [found[name].value for name in ("drafts", "draft_tokens", "accepted_tokens")], per_pos


def test_positions_are_depths(config):
    assert DEPTH < NODES
    assert counted(config) == ([5, 24, 7], [4, 2, 1])


def test_vllm_counts_one_position_per_node(config, monkeypatch):
    """The behavior that is overridden; if this fails, the override can be removed."""
    monkeypatch.setattr(PrometheusStatLogger, "__init__", PrometheusStatLogger.__init__.__wrapped__)
    assert counted(config) == ([5, 24, 7], [4, 2, 1, 0, 0, 0])


def test_other_engines_are_unaffected(target, config):
    PrometheusStatLogger(make_config(target, None), [0])
    assert not [m for m in get_metrics_snapshot() if "spec_decode" in m.name]


def test_the_log_line_has_depths(config):
    logger, lines = LoggingStatLogger(config), []
    record(logger)
    logger.record(sent(SpecDecodingStats.new(NODES)), None)  # a step without drafts
    logger.spec_decoding_logging.log(lambda text, *values: lines.append(text % values))
    (line,) = lines
    assert "Mean acceptance length: 2.40" in line
    assert "Drafted: 24 tokens" in line
    assert "Per-position acceptance rate: 0.800, 0.400, 0.200, Avg" in line
    logger.spec_decoding_logging.log(lambda text, *values: lines.append(text))  # nothing new
    assert len(lines) == 1


def reported():
    """The registry's metrics for steps of dynamic trees."""
    return {
        m.name.removeprefix("vllm:medusa_") + m.labels.get("kind", ""): m.value
        for m in get_metrics_snapshot()
        if m.name.startswith("vllm:medusa_")
    }


@pytest.mark.parametrize("budget", ["auto", 7, {"max_rows": 64}])
def test_steps_of_dynamic_trees(target, random_heads, config, budget):
    logger = PrometheusStatLogger(make_config(target, random_heads, budget), [0])
    first, second = StepReport(chosen=40), StepReport(chosen=3, ratio=1250)
    first.add(5, 40, prefill=False, drafted=True)
    first.time(12.5, 10.0)
    for prefill, drafted in ((True, True), (False, True), (False, False), (False, False)):
        second.add(2, 0, prefill=prefill, drafted=drafted)
    for report in (first, second):
        stats = SpecDecodingStats.new(63)
        report.put_into(stats)
        logger.record(sent(stats), None)
    expected = {
        "stepstree": 1, "stepsprefill": 1, "stepsheads": 1, "stepsplain": 2, "step_requests": 13,
        "nodes": 40, "budget_nodes": 3,
    }  # fmt: skip
    if budget != 7:  # whose times are not measured
        expected |= {"timed_steps": 1, "measured_ms": 12, "expected_ms": 10, "expected_ratio": 1.25}
    assert reported() == expected


def registered():
    """The names of all series in the registry."""
    found = set()
    for family in (family for family in REGISTRY.collect() if family.name.startswith("vllm:")):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        found |= {family.name + end for end in ends.get(family.type, [""])}
    return found


def test_the_documentation_has_the_registered_metrics(target, random_heads, config):
    PrometheusStatLogger(make_config(target, random_heads, "auto", lookup=True), [0])
    found = registered()
    root = Path(__file__).parents[3]
    dashboard = json.loads((root / "examples" / "grafana_dashboard.json").read_text())
    shown = {t["expr"] for panel in dashboard["panels"] for t in panel["targets"]}
    assert names_in("\n".join(shown)) <= found
    assert names_in(dashboard["templating"]["list"][1]["query"]) <= found
    page = names_in((root / "docs" / "reference" / "metrics.md").read_text())
    assert page <= found
    ours = {name for name in found if name.startswith("vllm:medusa_")}
    assert ours == {name for name in page if name.startswith("vllm:medusa_")}
    assert "vllm:medusa_wrong_total" not in found


def names_in(text):
    return set(re.findall(r"vllm:\w+", text))


def test_static_trees_send_no_report(target, random_heads, config):
    """Engines with a static tree send vLLM's own list, which has its own meaning."""
    assert StepReport.of(SpecDecodingStats.new(20)) is None
    assert StepReport.of(SpecDecodingStats(20)) is None
    logger = PrometheusStatLogger(make_config(target, random_heads, "auto"), [0])
    record(logger)
    assert not any(reported().values())
    PrometheusStatLogger(config, [0])
    assert reported() == {}


def test_engines_in_one_process_have_separate_metrics(target, random_heads):
    """vLLM's registry only has those of the engine that started last."""
    engines = []
    for heads in (random_heads, random_heads, None):
        config = make_config(target, None) if heads is None else make_config(target, heads, 7)
        engine = LLMEngine.__new__(LLMEngine)
        engine.log_stats, engine.logger_manager = True, StatLoggerManager(config)
        engines.append(engine)
    for engine, steps in zip(engines, (1, 3, 5), strict=True):
        for _ in range(steps):
            stats = SpecDecodingStats.new(7)
            stats.observe_draft(7, 2)
            report = StepReport()
            report.add(1, 7, prefill=False, drafted=True)
            report.put_into(stats)
            engine.logger_manager.record(sent(stats), None)

    def values(engine, name):
        return [m.value for m in engine.get_metrics() if m.name == name]

    names = ("vllm:spec_decode_num_drafts", "vllm:medusa_nodes")
    assert [values(engine, names[0]) for engine in engines] == [[1], [3], []]
    assert [values(engine, names[1]) for engine in engines] == [[7], [21], []]
    assert REGISTRY is reader.REGISTRY
    unregister_vllm_metrics()
