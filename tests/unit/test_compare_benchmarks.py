"""Benchmarks of engines and servers: which numbers may be reported, and their arithmetic."""

import math
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import assets
from support.fake_engine import FakeEngine

from benchmarks import budgets, compare, engines, grammar, profile, serve, soak
from benchmarks.budgets import BudgetOptions, Turns
from benchmarks.compare import CompareOptions, arm_of
from benchmarks.engines import PLAIN, SAMPLED_STOCK, tau_numbers, with_error
from benchmarks.profile import ProfileOptions, average_parts, parts_tables, summarize
from benchmarks.report import draw
from benchmarks.serve import AGAIN, Load, ServeOptions
from benchmarks.soak import problem_of
from benchmarks.soak_requests import COMPLETION, Request, requests
from benchmarks.soak_requests import Answer as Answered
from benchmarks.spans import Spans
from vllm_medusa.job import SILENT, JobFailed
from vllm_medusa.offline.batch import Answer, Conversation, Result, run_batch
from vllm_medusa.offline.prompts import Prompt

ASSETS: dict[str, Any] = {
    "target": Path(assets.TARGET),
    "drafter": Path(assets.HEADS),
    "texts": (assets.ASSETS / "prompts.jsonl",),
}


@pytest.fixture
def options():
    forms = ("automatic", "chain", "stock", "static", "ngram")
    return CompareOptions(**ASSETS, forms=forms, chain=(2, 3), nodes=(2, 99), prompts=3, rounds=2)


def process(like: Any) -> Any:
    """Replaces `EngineProcess`: ``like`` maps a speculative config to a fake engine."""

    def started(settings, sampling):
        engine = like(settings["speculative_config"])

        def run(prompts, concurrency, seed):
            how = {"concurrency": concurrency, "seed": seed, "session": made.session}
            return list(run_batch(prompts, engine(), **how)), 1.0

        made: Any = nullcontext()
        made.run, made.session, made.count = run, Conversation, lambda name: 0.0
        return made

    return started


def rows_of(options: Any, monkeypatch: pytest.MonkeyPatch, like: Any) -> dict[str, Any]:
    monkeypatch.setattr(engines, "EngineProcess", process(like))
    monkeypatch.setattr(engines, "_binding", lambda *_: {})
    rows = [row.to_dict() for row in compare.run(options, SILENT)]
    return {row["name"]: row for row in rows}


def test_arms_with_equal_tokens_get_a_ratio(options, monkeypatch, tmp_path):
    rows = rows_of(options, monkeypatch, lambda c: lambda: FakeEngine(step_sizes=(1 + bool(c),)))
    names = ["automatic", "chain 2", "chain 3", "stock 2", "stock 3", "static 2"]
    names = [f"heads, {name}" for name in names] + ["n-gram 2, vLLM's", "n-gram 3, vLLM's"]
    assert set(rows) == {f"{name}, T {t}, batch 1, prompts" for t in ("0", "0.7") for name in names}
    static = rows["heads, static 2, T 0, batch 1, prompts"]
    assert static["ratio"] == 1 and static["tau"] > 1.3 and static["rounds"] == 2
    assert static["step_ms"] > static["plain_step_ms"] and static["requests"] == 6
    assert static["plain_steps"] == pytest.approx(static["tau"] * static["steps"], abs=3)
    draw(list(rows.values()), compare.SPEED.plot, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_starts_are_combined(options, monkeypatch):
    started = []

    def like(config):
        started.append("plain" if config is None else config["method"])
        return lambda: FakeEngine(step_sizes=(1 + bool(config),))

    options = replace(options, forms=("automatic", "plain"), starts=3, temperatures=(0,))
    rows = rows_of(options, monkeypatch, like)
    assert started == 3 * ["plain", "medusa", "plain"]
    assert list(rows) == ["heads, automatic, T 0, batch 1, prompts", "plain, T 0, batch 1, prompts"]
    for row in rows.values():
        assert row["rounds"] == len(row["ratios"]) == 6 and row["requests"] == 18
    assert rows["plain, T 0, batch 1, prompts"]["tau"] == 1


def test_the_row_of_an_engine_that_fails_in_a_later_start(options, monkeypatch):
    started = []

    def like(config):
        started.append(config)
        if len(started) == 5:
            raise JobFailed("out of memory")
        return lambda: FakeEngine()

    options = replace(options, forms=("automatic", "plain"), starts=3, temperatures=(0,))
    rows = rows_of(options, monkeypatch, like)
    assert len(started) == 3 + 3 + 2
    assert "out of memory" in rows["heads, automatic, T 0, batch 1"]["failed"]
    assert rows["plain, T 0, batch 1, prompts"]["rounds"] == 6


def test_an_expression_that_matches_no_arm_is_refused():
    arms = [PLAIN, engines.Arm("hydra, automatic")]
    assert CompareOptions(only="hydra").chosen(arms) == arms[1:]
    with pytest.raises(ValueError, match="--only eagle matches none of: plain; hydra, automatic"):
        CompareOptions(only="eagle").chosen(arms)


def test_stock_speculation_is_not_measured_when_sampling(options, monkeypatch):
    rows = rows_of(options, monkeypatch, lambda config: FakeEngine)
    for name in ("heads, stock 2", "n-gram 2, vLLM's"):
        assert rows[f"{name}, T 0.7, batch 1, prompts"]["note"] == SAMPLED_STOCK
        assert "ratio" in rows[f"{name}, T 0, batch 1, prompts"]
    assert "rejection sampler" in compare.text(list(rows.values()))


def test_an_arm_with_other_tokens_gets_no_number(options, monkeypatch):
    """Negative control of the check, and an engine that fails to start."""

    def like(config):
        if config and config["method"] == "ngram":
            raise JobFailed("no hidden_size")
        wrong = config is not None and config.get("tree") == {"chain": 3}
        return lambda: FakeEngine(wrong_at=0 if wrong else None)

    rows = rows_of(options, monkeypatch, like)
    wrong = rows["heads, chain 3, T 0, batch 1, prompts"]
    assert wrong["failed"].startswith("6 of 6 answers differ from plain vLLM's, first ")
    assert not {"ratio", "tau", "step_ms"} & wrong.keys()
    assert rows["n-gram 2, vLLM's, T 0, batch 1"]["failed"] == "JobFailed: no hidden_size"
    assert rows["heads, static 2, T 0.7, batch 1, prompts"]["ratio"] == 1


def test_without_rounds_plain_answers_once_and_tasks_are_merged(options, monkeypatch, tmp_path):
    lines = ASSETS["texts"][0].read_text().splitlines()
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:4]))
    calls = []

    def like(config):
        calls.append(config)
        return lambda: calls.append(config) or FakeEngine(step_sizes=(1 + bool(config),))

    forms = {"forms": ("dynamic", "both"), "nodes": (2,), "temperatures": (0.0,)}
    rows = rows_of(
        replace(options, texts=(tmp_path,), rounds=0, **forms), monkeypatch, like
    ).values()
    assert [row.get("texts", row) for row in rows] == 2 * ["a", "b", "all"]
    # each engine starts once; both tasks have the same prompts, which plain answered once
    assert sum(config is None for config in calls) == 1 + 1
    *_, a, b, every = rows
    assert a["gain"] == b["gain"] == 0 and "ratio" not in a
    assert every["steps"] == a["steps"] + b["steps"] and every["tau"] == pytest.approx(a["tau"])


def test_the_environment_of_an_arm_is_restored(options, monkeypatch, tmp_path):
    before = dict(engines.os.environ)
    monkeypatch.setattr(engines, "_OPENMP", "none")
    own = replace(options, cores=(0, 1))
    for arm, plugins in ((PLAIN, "none"), (arm_of(options.drafter, "automatic", 0), "medusa")):
        with engines.environment(arm, own, str(tmp_path)):
            found = dict(engines.os.environ)
        assert found["VLLM_PLUGINS"] == plugins
        assert found["OMP_NUM_THREADS"] == "2" and found["GOMP_CPU_AFFINITY"] == "0 1"
    assert found["VLLM_CACHE_ROOT"] == str(tmp_path)
    assert dict(engines.os.environ) == before


def test_the_error_of_a_gain_excludes_shared_variance():
    rng = np.random.default_rng(0)
    steps = np.full(200, 30)
    hard = rng.uniform(0.2, 1.8, 200)
    static = [(int(30 * h), 30) for h in hard]
    dynamic = [(int(30 * h * 1.2), 30) for h in hard]
    ratio, error = with_error(dynamic, static)
    value, own = with_error(dynamic)
    assert value == pytest.approx(1 + sum(a for a, _ in dynamic) / steps.sum())
    assert own == pytest.approx(np.std([a / 30 for a, _ in dynamic]) / np.sqrt(200), rel=0.05)
    assert ratio == pytest.approx(1.1, abs=0.01) and error < 0.2 * own
    assert tau_numbers(dynamic, static)["gain"] == pytest.approx(ratio - 1)


def test_complete_answers_to_a_schema_are_json():
    def result(text, reason):
        return Result(Prompt(0, 1, "p"), (Answer(text=text, finish_reason=reason),))

    assert grammar.judge([result("{}", "stop"), result('{"a', "length")]) == {"complete": "1/2"}
    with pytest.raises(ValueError, match="Expecting"):
        grammar.judge([result("no", "stop")])
    by_schema = grammar.tasks_of(grammar.GrammarOptions(**ASSETS))
    mixed = grammar.tasks_of(grammar.GrammarOptions(**ASSETS, rounds=1))
    assert len(by_schema) == 7 and {len(own) for own in by_schema.values()} == {4}
    indices = [prompt.index for own in by_schema.values() for prompt in own]
    assert [p.index for p in mixed["all schemas"]] == sorted(indices) == list(range(28))


def test_a_profiled_arm_must_have_equal_tokens_too(monkeypatch):
    def found(arm, options, temperature):
        if arm.stock:
            raise RuntimeError("no hidden_size")
        return {0: [1, int("chain" in arm.name)]}, {"attention": 2.0}

    monkeypatch.setattr(profile, "_in_a_process", found)
    given = ProfileOptions(**ASSETS, forms=("dynamic", "chain", "stock"), nodes=2, chain=2)
    rows = [row.to_dict() for row in profile.run(given, SILENT)]
    names = ["plain", "heads, dynamic 2", "heads, chain 2", "heads, stock 2"]
    assert [row["arm"] for row in rows[:4]] == names
    assert rows[1]["step_ms"] == 2 and rows[1]["target_forward_ratio"] == 1
    assert rows[2]["failed"] == "1 of 1 answers differ from plain vLLM's"
    assert rows[3]["failed"] == "RuntimeError: no hidden_size"
    assert rows[7]["note"] == SAMPLED_STOCK
    assert "| attention | 2.000 | 2.000 |" in parts_tables(rows)


class Scheduler:
    """A step verifies what the budget of the step before drafted.

    It takes 10 ms and 2 ms for each node per request, and yields a token for two nodes.
    """

    ahead, max_drafts = False, 8

    def __init__(self) -> None:
        self.policy: Any = SimpleNamespace(max_drafts=4)
        self.learned: list[tuple[Any, int]] = []
        self.drafted = 0

    def _learn_time(self, ended: Any) -> None:
        self.learned.append((self.policy, ended[0].nodes))

    def run(self, steps: int, requests: int = 4, *, prefill: bool = False) -> None:
        for _ in range(steps):
            nodes, self.drafted = self.drafted, self.policy.max_drafts
            step = SimpleNamespace(prefill=prefill, requests=requests, nodes=requests * nodes)
            step.tokens, step.limit = requests * (1 + nodes / 2), self.drafted
            self._learn_time(None)
            self._learn_time((step, 10.0 + 2.0 * nodes))


def test_budgets_take_turns():
    scheduler = Scheduler()
    turns = Turns(scheduler, (2, 8), 4)
    scheduler.run(8000)
    for budget in turns.budgets.values():  # 19 of every 20 steps count
        own = [nodes for policy, nodes in scheduler.learned if policy is budget]
        assert {*own} == {4 * budget.max_drafts} and len(own) == pytest.approx(1900, abs=40)
    assert turns.budgets["automatic"]._last_limit == 4
    names = ["0", "2", "8", "automatic"]
    found = budgets.summarize(turns.steps, names, 4)
    assert [row["ratio"] for row in found.values()] == pytest.approx([1, 20 / 14, 50 / 26, 30 / 18])
    assert found["2"]["ratio_quartiles"] == pytest.approx([20 / 14] * 2)
    own = found["automatic"]
    assert (own["tau"], own["verified"], own["step_ms"], own["best"]) == (3, 4, 18, "8")
    assert own["relative"] == pytest.approx(30 / 18 / (50 / 26)) and "best" not in found["8"]
    half = [step for step in turns.steps if step[1] != "2"]
    with pytest.raises(ValueError, match="no step of a full batch with budget 2"):
        budgets.summarize(half, names, 4)
    counted = len(turns.steps)
    scheduler.run(100, requests=3)
    scheduler.run(100, prefill=True)
    assert len(turns.steps) == counted
    with pytest.raises(ValueError, match="nodes has 9; use at most 8"):
        Turns(scheduler, (9,), 4)


def test_the_scheduler_has_what_turns_replace():
    pytest.importorskip("vllm")
    from vllm_medusa.integration.scheduling.scheduler import TreeScheduler

    assert callable(TreeScheduler._learn_time) and TreeScheduler.ahead is False


def test_speed_that_wanders_cancels_in_relative_speeds():
    """The same steps, at twice the time in every second cycle."""
    steps = [
        (turn, "0a"[turn % 2], 10.0 * (1 + (turn - 1) // 2 % 2), 1, 0) for turn in range(1, 81)
    ]
    found = budgets.summarize(steps, ["0", "a"], 1)
    assert found["a"]["relative_quartiles"] == pytest.approx([1, 1], abs=0.03)


def test_budgets_with_other_tokens_get_no_number(monkeypatch):
    def measured(job, options, progress, *, arm, batch, temperature, log):
        assert job is budgets.measure and arm.config["budget"] == "auto"
        engine = FakeEngine(wrong_at=0 if batch == 2 else None)
        session = budgets.session(options)
        found = list(run_batch(options.all_prompts(), engine, concurrency=batch, session=session))
        turns = Turns(Scheduler(), options.nodes, batch)
        turns.scheduler.run(400, requests=batch)
        return found, turns.steps

    monkeypatch.setattr(engines, "EngineProcess", process(lambda config: FakeEngine))
    monkeypatch.setattr(engines, "_binding", lambda *_: {})
    monkeypatch.setattr(budgets, "run_in_process", measured)
    given = BudgetOptions(**ASSETS, prompts=4, batch=(1, 2), temperatures=(0,))
    rows = [row.to_dict() for row in budgets.run(given, SILENT)]
    assert [row["arm"] for row in rows[:4]] == ["no drafts", "2 nodes", "4 nodes", "automatic"]
    assert rows[1]["ratio"] == pytest.approx(20 / 14) and rows[1]["requests"] == 4
    assert {row["failed"] for row in rows[4:]} == {"4 of 4 answers differ from plain vLLM's"}
    with pytest.raises(ValueError, match="4 prompts for batch 3; use at least 6"):
        next(budgets.run(replace(given, batch=(1, 3)), SILENT))


def test_spans_have_exclusive_times_that_sum_up():
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
    steps = [(1.0, False, {"attention": 1.0})]
    steps += [(0.01, True, {"attention": 0.004, "drafter": 0.006}) for _ in range(8)]
    steps += [(9.0, True, {"drafter": 9.0})]
    parts = average_parts(steps)
    assert parts == pytest.approx({"attention": 4.0, "drafter": 6.0})
    summary = summarize(parts, {"attention": 2.0, "sampling": 1.0})
    assert summary["own_overhead_share"] == pytest.approx(0.6)
    assert summary["beyond_plain_ms"] == pytest.approx(5.0)
    assert summary["target_forward_ratio"] == pytest.approx(2.0)
    assert not math.isnan(summary["step_ms"])


def test_arrivals_are_poisson_and_equal_for_all_servers():
    load = Load("4/s", 4.0, 1000.0)
    found = np.array(load.arrivals(0))
    assert found.tolist() == load.arrivals(0) != load.arrivals(1)
    gaps = np.diff(found)
    assert gaps.min() >= 0 and found[-1] < 1000
    assert len(found) == pytest.approx(4000, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert len(Load("idle", 1e-6, 10.0).arrivals(0)) == 1


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


def test_servers_alternate_and_other_answers_have_no_figures(monkeypatch):
    planned = []

    class Server:
        def __init__(self, arm, options):
            self.name = arm.name

        def __enter__(self):
            if self.name == "heads, dynamic 4":
                raise JobFailed("no room")
            return self.name

        def __exit__(self, *_):
            pass

    def ask(url, requests, seconds):
        planned.append((url, requests))
        wrong = url == "heads, automatic" and requests == ("4/s", 1)
        return answers(["a", "x" if wrong else "b"], 0.1 if url == "plain" else 0.08)

    monkeypatch.setattr(serve, "server", Server)
    monkeypatch.setattr(serve, "requests", lambda load, number, *_: (load.name, number))
    monkeypatch.setattr(serve, "ask", ask)
    options = ServeOptions(**ASSETS, rates=(1.0, 4.0), ramp=0.0, temperatures=(0.7,))
    rows = [row.to_dict() for row in serve.run(options, SILENT)]
    turns = ["plain", "heads, automatic", "plain", "plain", "heads, automatic", "plain"]
    assert planned[2:8] == [(url, ("1/s", i // 3)) for i, url in enumerate(turns)]
    assert rows[0]["failed"] == "no room" and rows[0]["arm"] == "heads, dynamic 4"
    assert [row["arm"] for row in rows[1:]] == 2 * ["plain", "heads, automatic", AGAIN]
    assert rows[2]["requests"] == 4 and rows[4]["requests"] == 4
    ratios = [(row["speed_ratio"], row["ttft_ratio"]) for row in rows[1:4]]
    assert ratios == [(1, 1), (pytest.approx(1.25), pytest.approx(0.8)), (1, 1)]
    assert rows[5]["failed"] == "1 of 4 answers differ from plain vLLM's"
    rows = [row.to_dict() for row in serve.run(replace(options, dtype="bfloat16"), SILENT)]
    assert [row["differing"] for row in rows[1:]] == [0, 0, 0, 0, 1, 0]


def test_servers_get_only_flags_that_vllm_knows():
    pytest.importorskip("vllm")
    from support.vllm_parser import server_parser

    parser = server_parser()
    arm = arm_of(Path(assets.HEADS), "automatic", 0)
    more = soak.server_options(soak.SoakOptions(**ASSETS))
    for words in (
        serve.server_args(PLAIN, ServeOptions(**ASSETS), 8000),
        serve.server_args(arm, ServeOptions(**ASSETS, dtype="bfloat16"), 8000, more),
    ):
        args = parser.parse_args(["--model", *words])
        assert args.port == 8000 and not args.disable_log_stats


def test_a_server_binds_its_own_workers(monkeypatch):
    """If a server process is bound, its workers inherit its main thread's single core."""
    seen = {}

    def child(*_):
        seen.update(os.environ)
        raise JobFailed("not started")

    monkeypatch.setattr(serve, "Child", child)
    for name in ("KMP_AFFINITY", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobFailed, match="not started"), serve.server(PLAIN, ServeOptions(**ASSETS)):
        pass
    assert "VLLM_CPU_OMP_THREADS_BIND" in seen or torch.accelerator.is_available()
    assert not [name for name in seen if name.endswith("AFFINITY")]


def test_the_same_seed_gives_the_same_requests():
    planned = requests(list("abcd"), 300, 5)
    assert planned == requests(list("abcd"), 300, 5) != requests(list("abcd"), 300, 6)
    kinds = {each.kind: each for each in planned}
    assert len(kinds) == 11 and {"tools", "schema", "cancelled stream", "malformed"} <= kinds.keys()
    assert all(
        each.body["temperature"] == 0 or "seed" in each.body for each in planned if each.compared
    )


def test_answers_are_verified():
    compared = Request("x", COMPLETION, {"prompt": "a"})
    refused = Request("x", COMPLETION, {"prompt": "a"}, compared=False, refused=True)
    free = Request("x", COMPLETION, {"prompt": "a"}, compared=False)
    good, other = Answered(texts={0: "b"}, reasons={0: "stop"}), Answered(texts={0: "c"})
    wanted = {compared.key: vars(good)}
    assert not problem_of(compared, good, wanted)
    assert "plain" in problem_of(compared, other, wanted)
    for planned in (compared, refused, free):
        assert "lost" in problem_of(planned, "TimeoutError: ", wanted)
    assert not problem_of(refused, Answered(error=(400, "BadRequestError")), wanted)
    for status in (500, None):
        assert problem_of(refused, Answered(error=status and (status, "x")), wanted)
    assert not problem_of(free, other, wanted)
    assert problem_of(free, Answered(error=(500, "x")), wanted)
