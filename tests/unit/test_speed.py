"""The benchmarks of engines: what may be reported, and the arithmetic of the parts of a step."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import FakeEngine

from benchmarks import arms, profile, speed
from benchmarks.arms import PLAIN
from benchmarks.profile import ProfileOptions, average_parts, parts_tables, summarise
from benchmarks.spans import Spans
from benchmarks.speed import NO_BASELINE, SpeedOptions
from vllm_medusa.job import SILENT, JobFailed
from vllm_medusa.offline.batch import Conversation, run_batch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def options():
    return SpeedOptions(
        target=ROOT / "tests" / "assets" / "target",
        heads=ROOT / "tests" / "assets" / "heads",
        chain_depths=(3,),
        stock_depths=(2,),
        tree_sizes=(2, 99),  # the heads' own tree has 12 nodes
        dynamic_sizes=(7,),
        prompts=3,
        repeats=2,
    )


def process(like: Any) -> Any:
    """In the place of `EngineProcess`: ``like`` maps a speculative config to a fake engine."""

    def started(settings, sampling):
        engine = like(settings.speculative_config)

        def run(prompts, concurrency, seed):
            how = {"concurrency": concurrency, "seed": seed, "session": made.session}
            return list(run_batch(prompts, engine(), **how)), 1.0

        made: Any = nullcontext()
        made.run, made.session = run, Conversation
        return made

    return started


def rows_of(options: SpeedOptions, monkeypatch: pytest.MonkeyPatch, like: Any) -> dict[str, Any]:
    monkeypatch.setattr(arms, "EngineProcess", process(like))
    monkeypatch.setattr(arms, "_binding", lambda options: {})
    rows = [row.to_dict() for row in speed.run(options, SILENT)]
    return {row["name"]: row for row in rows}


def test_arms_with_plain_s_tokens_get_a_ratio(options, monkeypatch):
    def like(config):
        return lambda: FakeEngine(step_sizes=(1,) if config is None else (2,))

    rows = rows_of(options, monkeypatch, like)
    names = ["automatic", "chain 2, ours", "chain 2, vLLM's", "chain 3, ours", "tree 2"]
    names += ["dynamic 7", "n-gram 5, vLLM's"]
    assert {row["name"] for row in rows.values()} == rows.keys()
    assert set(rows) == {f"{name}, T {t}" for t in ("0", "0.8") for name in names}
    assert rows["tree 2, T 0"]["ratio"] == 1 and rows["tree 2, T 0"]["tau"] > 1.3
    assert rows["tree 2, T 0"]["step_ms"] > rows["tree 2, T 0"]["plain_step_ms"]


def test_stock_speculation_is_no_baseline_when_sampling(options, monkeypatch):
    """Its chain through our engine stands in the row before."""
    rows = rows_of(options, monkeypatch, lambda config: FakeEngine)
    for name, ours in (("chain 2, vLLM's", "chain 2, ours"), ("n-gram 5, vLLM's", "automatic")):
        assert rows[f"{name}, T 0.8"]["note"] == NO_BASELINE
        assert "ratio" not in rows[f"{name}, T 0.8"] and "ratio" in rows[f"{ours}, T 0.8"]
        assert "ratio" in rows[f"{name}, T 0"]
    assert "rejection sampler" in speed.CASE.text(list(rows.values()))


def test_an_arm_with_other_tokens_gets_no_number_and_the_others_go_on(options, monkeypatch):
    """Negative control of the gate, and an engine that does not start."""

    def like(config):
        if config and config["method"] == "ngram":
            raise JobFailed("no hidden_size")
        wrong = config is not None and config.get("tree") == {"chain": 3}
        return lambda: FakeEngine(wrong_at=0 if wrong else None)

    rows = rows_of(options, monkeypatch, like)
    wrong = rows["chain 3, ours, T 0"]
    assert wrong["failed"].startswith("7 of 7 answers differ from plain vLLM's, first ")
    assert not {"ratio", "tau", "step_ms"} & wrong.keys()
    assert rows["n-gram 5, vLLM's, T 0"]["failed"] == "JobFailed: no hidden_size"
    assert rows["tree 2, T 0.8"]["ratio"] == 1


def test_one_engine_of_an_arm_serves_every_load_and_another_goes_on_after_a_failure(
    options, monkeypatch
):
    started = []

    def like(config):
        started.append(config and config["tree"])
        calls = []

        def made():
            calls.append(None)
            if config and len(started) == 2 and len(calls) == 2:  # the first engine, at once
                raise JobFailed("killed")
            return FakeEngine(step_sizes=(1,) if config is None else (2,))

        return made

    options = replace(options, batch=(1, 4), only="chain 3", repeats=1, max_rows=15)
    rows = rows_of(replace(options, prompts=1), monkeypatch, like)
    assert len(started) == 3
    notes = [row.get("failed") or row.get("note") or row["rounds"] for row in rows.values()]
    left_out = "16 rows a step, --max-rows is 15"
    assert notes == [left_out, left_out, "JobFailed: killed", 1]
    rows = rows_of(replace(options, max_rows=16), monkeypatch, like)
    assert [row["rounds"] for row in rows.values()] == [1] * 4
    assert {len(row["ratios"]) for row in rows.values()} == {1}
    assert rows["chain 3, ours, T 0, batch 4"]["requests"] == 4  # of a file of 32, three asked for
    rows = rows_of(replace(options, max_rows=16, waves=2), monkeypatch, like)
    assert [row["requests"] for row in rows.values()] == [3, 3, 8, 8]


def test_uneven_answers_have_lengths_of_their_own(options, monkeypatch):
    """The same of both engines; otherwise nobody says how long an answer may be."""
    engines: dict[bool, list[FakeEngine]] = {True: [], False: []}

    def like(config):
        return lambda: engines[config is None].append(FakeEngine()) or engines[config is None][-1]

    options = replace(options, only="chain 3", repeats=1, prompts=32, batch=(4,), max_tokens=24)
    rows_of(options, monkeypatch, like)
    assert not any(asked for engine in engines[True] for asked in engine.options.values())
    for made in engines.values():
        made.clear()
    rows_of(replace(options, uneven=True), monkeypatch, like)
    plain, chain = ([engine.options for engine in engines[which]] for which in (True, False))
    assert plain == chain
    lengths = {asked["max_tokens"] for each in plain for asked in each.values()}
    assert len(lengths) > 12 and lengths <= set(range(12, 37))


def test_automatic_stands_beside_the_best_of_the_others():
    def row(arm, batch, ratio):
        more = {"temperature": 0.0, "lower_quartile": ratio, "first": 0.5}
        return more | {"arm": arm, "batch": batch, "ratio": ratio}

    rows = [row("automatic", 1, 1.5), row("tree 2", 1, 1.25), row("tree 4", 1, 1.2)]
    rows += [row("automatic", 8, 0.9), row("tree 2", 8, 0.8), row("tree 4", 16, 2.0)]
    rows.append({"arm": "tree 31", "batch": 8, "note": "left out"})
    found = speed.best_beside_automatic(rows)
    assert [(each["best"], each["of_the_best"]) for each in found] == [
        ("tree 2", 1.2),
        ("plain", 0.9),
    ]
    assert "| 0 | 8 | 0.900 |" in speed.text(rows)


def test_the_environment_is_the_arm_s_and_is_put_back(options, monkeypatch):
    before = dict(arms.os.environ)
    gnu = ProfileOptions(target=Path("t"), heads=Path("h"), openmp="gomp", cores=(0, 1))
    for arm, plugins in ((PLAIN, "none"), (arms.chain_arm(options, 1), "medusa")):
        with arms.environment(arm, gnu):
            found = dict(arms.os.environ)
        assert found["VLLM_PLUGINS"] == plugins
        assert found["OMP_NUM_THREADS"] == "2" and found["GOMP_CPU_AFFINITY"] == "0 1"
    assert dict(arms.os.environ) == before


def test_a_profiled_arm_must_have_plain_s_tokens_too(options, monkeypatch):
    def found(arm, options, temperature):
        if arm.kind == "stock":
            raise RuntimeError("no hidden_size")
        return {"a": [1, int(arm.name == "chain 2, ours")]}, {"attention": 2.0}

    monkeypatch.setattr(profile, "_in_a_process", found)
    sizes = {"nodes": (2,), "chain_depths": (2,), "temperatures": (0.0, 0.8)}
    asked = ProfileOptions(target=options.target, heads=options.heads, **sizes)
    rows = [row.to_dict() for row in profile.run(asked, SILENT)]
    names = ["plain", "tree 2", "chain 2, ours", "chain 5, vLLM's"]
    assert [row["arm"] for row in rows[:4]] == names
    assert rows[1]["step_ms"] == 2 and rows[1]["target_forward_ratio"] == 1
    assert rows[2]["failed"] == "1 of 1 answers differ from plain vLLM's"
    assert rows[3]["failed"] == "RuntimeError: no hidden_size"
    assert rows[7]["note"] == NO_BASELINE
    assert "| attention | 2.000 | 2.000 |" in parts_tables(rows)


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
    steps = [(1.0, False, {"attention": 1.0})]
    steps += [(0.01, True, {"attention": 0.004, "heads": 0.006}) for _ in range(8)]
    steps += [(9.0, True, {"heads": 9.0})]
    parts = average_parts(steps)
    assert parts == pytest.approx({"attention": 4.0, "heads": 6.0})
    summary = summarise(parts, {"attention": 2.0, "sampling": 1.0})
    assert summary["own_overhead_share"] == pytest.approx(0.6)
    assert summary["beyond_plain_ms"] == pytest.approx(5.0)
    assert summary["target_forward_ratio"] == pytest.approx(2.0)
