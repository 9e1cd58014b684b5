"""The benchmarks `serve` and `tau`: arrivals, what a server is asked, errors of a gain."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import serve, tau
from benchmarks.arms import PLAIN, dynamic_arm
from benchmarks.serve import AGAIN, Answers, Load, ServeOptions
from vllm_medusa.job import SILENT, JobFailed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options():
    return ServeOptions(
        target=ROOT / "tests" / "assets" / "target",
        heads=ROOT / "tests" / "assets" / "heads",
        rates=(1.0, 4.0),
        ramp=0.0,
        rounds=2,
        warm_up=0.0,
    )


def test_arrivals_are_poisson_and_the_same_for_everyone():
    load = Load("4/s", 4.0, 1000.0)
    found = np.array(load.arrivals(0))
    assert found.tolist() == load.arrivals(0) != load.arrivals(1)
    gaps = np.diff(found)
    assert gaps.min() >= 0 and found[-1] < 1000
    assert len(found) == pytest.approx(4000, rel=0.05) and gaps.std() == pytest.approx(
        0.25, rel=0.1
    )
    assert len(Load("idle", 1e-6, 10.0).arrivals(0)) == 1


def test_a_ramp_goes_up_and_down():
    found = Load("ramp", 40.0, 300.0, ramp=True).arrivals(0)
    shares = np.histogram(found, 6, (0, 300))[0] / (40 * 50)
    assert shares == pytest.approx(np.array([1, 3, 5, 5, 3, 1]) / 6, abs=0.06)


def answers(texts, ms):
    return {
        "latencies": [ms] * len(texts),
        "ttfts": [0.5 * ms] * len(texts),
        "output_lens": [3] * len(texts),
        "itls": [[0.25 * ms]] * len(texts),
        "generated_texts": texts,
        "errors": [""] * len(texts),
        "duration": 2.0,
    }


def test_figures_of_a_server():
    found = Answers([], [], [], [])
    found.add(answers(["a", "b"], 0.1))
    figures = found.figures()
    assert figures["tokens_per_second"] == 3 and figures["requests"] == 2
    assert figures["ttft_p50"] == pytest.approx(50) and figures["token_p99"] == pytest.approx(25)
    assert figures["gap_p99"] == pytest.approx(25)


def test_servers_take_turns_and_one_with_other_answers_has_no_figures(options, monkeypatch):
    asked = []

    class Server:
        def __init__(self, arm, options):
            self.name = arm.name

        def __enter__(self):
            if self.name == "tree 4":
                raise JobFailed("no room")
            return self.name

        def __exit__(self, *_):
            pass

    def ask(url, requests, seconds):
        asked.append((url, requests))
        wrong = url == "automatic" and requests == ("4/s", 1)
        return answers(["a", "x" if wrong else "b"], 0.1)

    monkeypatch.setattr(serve, "server", Server)
    monkeypatch.setattr(serve, "requests", lambda load, number, *_: (load.name, number))
    monkeypatch.setattr(serve, "ask", ask)
    rows = [row.to_dict() for row in serve.run(options, SILENT)]
    turns = ["plain", "automatic", "plain", "plain", "automatic", "plain"]
    assert asked[:6] == [(url, ("1/s", i // 3)) for i, url in enumerate(turns)]
    assert rows[0] == {"name": "tree 4", "arm": "tree 4", "failed": "no room"}
    assert [row["arm"] for row in rows[1:]] == 2 * ["plain", "automatic", AGAIN]
    assert rows[2]["requests"] == 4 and rows[4]["requests"] == 4
    assert rows[5]["failed"] == "1 of 4 answers differ from plain vLLM's"


def test_a_server_s_command_line_is_the_engine_s_settings(options):
    found = serve.words(dynamic_arm(options, "auto"), options, 8123)
    assert found[0] == str(options.target)
    config = json.loads(found[found.index("--speculative-config") + 1])
    assert config["budget"] == "auto" and found[found.index("--port") + 1] == "8123"
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(found)
    assert "--speculative-config" not in serve.words(PLAIN, options, 8123)


def test_the_error_of_a_gain_leaves_out_what_both_trees_share():
    rng = np.random.default_rng(0)
    steps = np.full(200, 30)
    hard = rng.uniform(0.2, 1.8, 200)
    static = [(int(30 * h), 30) for h in hard]
    dynamic = [(int(30 * h * 1.2), 30) for h in hard]
    ratio, error = tau.with_error(dynamic, static)
    value, own = tau.with_error(dynamic)
    assert value == pytest.approx(1 + sum(a for a, _ in dynamic) / steps.sum())
    assert own == pytest.approx(np.std([a / 30 for a, _ in dynamic]) / np.sqrt(200), rel=0.05)
    assert ratio == pytest.approx(1.1, abs=0.01) and error < 0.2 * own


def test_texts_are_put_together_by_their_steps():
    def row(arm, texts, value, steps):
        more = {"temperature": 0.0, "nodes": 7}
        return more | {"arm": arm, "texts": texts, "tau": value, "steps": steps}

    rows = [row(tau.STATIC, "a", 2.0, 100), row(tau.STATIC, "b", 1.0, 300)]
    rows += [row(tau.CALIBRATED, "a", 2.5, 80), row(tau.CALIBRATED, "b", 1.0, 300)]
    rows.append({"arm": tau.RAW, "nodes": 7, "failed": "no room"})
    (found,) = tau.together(rows)
    assert found[tau.STATIC] == 1.25 and found[tau.CALIBRATED] == pytest.approx(500 / 380)
    assert found[f"{tau.CALIBRATED} gain"] == pytest.approx(100 * (500 / 380 / 1.25 - 1))
    assert "| 0 | 7 | 1.250 | 1.316 | +5.3 |" in tau.text(rows)
