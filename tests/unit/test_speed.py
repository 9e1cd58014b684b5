"""The speed benchmark's own arithmetic: gate, measures, spans, arms, report."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.arms import PLAIN, ArmError, ArmProcess, Machine, our_arms, vllm_arms
from benchmarks.gate import NEAR_TIE, Gate, compare, flip_gap
from benchmarks.measure import Comparison, Run
from benchmarks.profile_step import average_parts, summarise
from benchmarks.report import markdown, plot
from benchmarks.spans import Spans
from vllm_medusa.sampler import draw_splitmix

V = 50


def fixed_scores(scores):
    return lambda rows: [scores[row[-1]] for row in rows]


@pytest.mark.parametrize(("gap", "green"), [(NEAR_TIE / 2, True), (NEAR_TIE * 2, False)])
def test_gate_lets_near_ties_pass_only(gap, green):
    score = fixed_scores({7: -1.0, 8: -1.0 - gap})
    gate = compare([[1], [2]], [[5, 7, 3], [4]], [[5, 8, 9], [4]], 0.0, V, score)
    (difference,) = gate.differences
    assert (difference.prompt, difference.position) == (0, 1)
    assert difference.gap == pytest.approx(gap)
    assert gate.green is green
    assert gate.to_dict()["text"].startswith("1/2 identical")


@pytest.mark.parametrize("got", [[5], [5, 7, 3, 1]])
def test_gate_is_red_when_an_output_stops_early_or_late(got):
    gate = compare([[1]], [[5, 7, 3]], [got], 0.0, V, fixed_scores({}))
    assert not gate.green
    assert math.isinf(gate.differences[0].gap)


def test_gate_of_equal_outputs():
    gate = compare([[1]], [[5, 7]], [[5, 7]], 0.0, V, fixed_scores({}))
    assert gate.green
    assert str(gate) == "1/1 identical"
    assert str(Gate(1, (), checked=False)) == "not comparable"


@pytest.mark.parametrize("seed", range(6))
def test_flip_gap_is_where_the_seeded_draw_changes(seed):
    """Just below the gap the draw is a, just above it is b, on the request's own noise."""
    temperature, position, log_a, log_b = 0.8, seed, -0.5, -2.0
    gap = flip_gap(3, 9, log_a, log_b, temperature, seed, position, V)

    def drawn(shift):
        logits = torch.full((V,), -torch.inf)
        logits[3], logits[9] = log_a / temperature, (log_b + shift) / temperature
        generator = torch.Generator().manual_seed(seed)
        for _ in range(position):
            draw_splitmix(torch.zeros(V), generator)
        return int(draw_splitmix(logits, generator))

    assert drawn(gap + 1e-3) == 9
    assert gap == 0 or drawn(gap - 1e-3) == 3


def test_run_separates_prefill_from_decoding():
    steps = [[0.5, 1, 1, True], [0.1, 3, 1, False], [0.2, 1, 1, False], [0.1, 0, 0, False]]
    run = Run.of(steps)
    assert run.seconds == pytest.approx(0.9)
    assert (run.tokens, run.decode_tokens, run.decode_emissions) == (5, 4, 2)
    assert run.decode_step_seconds == (0.1, 0.2)
    both = Comparison((Run.of([[1.0, 2, 1, False]]),) * 2, (run, Run.of([[0.5, 2, 1, False]])))
    summary = both.summary()
    assert summary["ratio"]["pairs"] == [pytest.approx(5 / 0.9 / 2, abs=1e-4), 2.0]
    assert summary["tau"] == 2.0
    assert summary["step_ms"] == pytest.approx(200)


def test_spans_count_exclusive_time_and_add_up():
    clock = iter(range(100))
    spans = Spans()
    owner = SimpleNamespace(inner=lambda: None)
    owner.outer = lambda: (owner.inner(), owner.inner())
    spans.hook(owner, "inner", "inside", within={"around": "in around"})
    spans.hook(owner, "outer", "around")
    spans.hook(owner, "absent", "nothing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.spans.time.perf_counter", lambda: next(clock))
        owner.outer()
        owner.inner()
    assert spans.take() == {"around": 3, "in around": 2, "inside": 1}  # 0..5 and 6..7
    assert spans.take() == {}


def test_profile_parts_ignore_stalls_and_prefills():
    steps = [[1.0, 1, 1, True, {"attention": 1.0}]]
    steps += [[0.01, 2, 1, False, {"attention": 0.004, "heads": 0.006}] for _ in range(8)]
    steps += [[9.0, 2, 1, False, {"heads": 9.0}]]
    parts = average_parts(steps)
    assert parts == pytest.approx({"attention": 4.0, "heads": 6.0})
    summary = summarise(parts, {"attention": 2.0, "sampling": 1.0})
    assert summary["own_overhead_share"] == pytest.approx(0.6)
    assert summary["beyond_plain_ms"] == pytest.approx(5.0)
    assert summary["target_forward_ratio"] == pytest.approx(2.0)


def test_arms():
    tree = [[0], [1], [0, 0]]
    arms = our_arms("H", [2], tree, [2, 9]) + vllm_arms("H", [3], [4])
    assert [arm.name for arm in arms] == ["chain 2", "tree 2", "vLLM chain 3", "n-gram 4"]
    assert arms[1].speculative_config == {"method": "medusa", "model": "H", "tree": [[0], [1]]}
    assert [arm.keeps_seeds for arm in (PLAIN, *arms)] == [True, True, True, False, False]
    machine = Machine((0, 1), openmp="gomp")
    assert machine.environment(arms[0])["VLLM_PLUGINS"] == "medusa"
    assert machine.environment(arms[2])["VLLM_PLUGINS"] == "none"
    assert machine.environment(PLAIN)["OMP_NUM_THREADS"] == "2"


def test_a_dead_engine_shows_the_end_of_its_log(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nread line\necho the reason >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ArmError, match=r"(?s)'plain' died.*the reason"):
        ArmProcess(PLAIN, {}, Machine((0,), openmp="gomp"), tmp_path / "logs" / "x.log")


def test_report_withholds_the_speed_of_a_red_gate(tmp_path):
    def row(arm, text, **more):
        return {
            "arm": arm,
            "kind": "ours",
            "num_draft_tokens": 7,
            "temperature": 0.0,
            "gate": {"text": text},
        } | more

    good = {"tau": 2.0, "step_ms": 20.0, "step_ratio": 1.1, "tokens_per_second": 99.0}
    good["ratio"] = {"min": 1.5, "median": 1.6, "max": 1.75}
    document = {
        "command": "python -m benchmarks.speed",
        "machine": {
            "cpu": "CPU", "vllm": "0.32.0", "torch": "2.13", "commit": "abc",
            "uncommitted_changes": False,
        },
        "setting": {
            "target_parameters": 310e6, "dtype": "bfloat16", "batch": 1, "cores": 2, "prompts": 4,
            "prompt_file": "prompts.jsonl", "max_tokens": 48, "repeats": 3, "temperatures": [0.0],
        },
        "rows": [row("tree 7", "4/4 identical", **good), row("tree 9", "3/4 DIFFERENT")],
    }  # fmt: skip
    text = markdown(document)
    assert "| tree 7 | 7 | 2.00 | 20.0 | 1.10 | 99.0 | **1.60** (1.50-1.75) | 4/4" in text
    assert "| tree 9 | 7 | - | - | - | - | RED, not reported | 3/4 DIFFERENT |" in text
    plot(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
