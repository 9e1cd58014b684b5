import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.assets import TARGET
from support.commands import run
from support.fake_engine import FakeProcess

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.job import SILENT
from vllm_medusa.offline import comparison
from vllm_medusa.offline.defaults import TargetSizes
from vllm_medusa.offline.options import CompareOptions
from vllm_medusa.offline.prompts import PromptError

AUTOMATIC = 0  # no budget and no tree
SECONDS = {None: 1.0, 2: 0.8, 4: 0.5, 6: 2.0, AUTOMATIC: 0.4}  # per group, by budget


class Engine(FakeProcess):
    """Replaces `EngineProcess`, with times from `SECONDS`."""

    wrong: int | None = None  # budget whose tokens are wrong
    started: list[Any] = []  # noqa: RUF012

    def __init__(self, settings: Any, sampling: Any):
        config = settings["speculative_config"]
        self.budget = config and config.get("num_speculative_tokens", AUTOMATIC)
        assert config is None or ("tree" in config) == (self.budget != AUTOMATIC)
        super().__init__(max_tokens=20, step_sizes=(1,) if config is None else (3, 1))
        self.wrong_at = 3 if config and self.budget == self.wrong else None
        Engine.started.append((settings, sampling))

    def run(self, prompts, concurrency, seed):
        return super().run(prompts, concurrency, seed)[0], SECONDS[self.budget]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "EngineProcess", Engine)
    monkeypatch.setattr(Engine, "started", [])
    monkeypatch.setattr(comparison, "answerable", lambda _, prompts, __: (prompts, [99]))
    monkeypatch.setattr(TargetSizes, "of", lambda *_: TargetSizes(500, 1000, 10, None))
    heads = MedusaHeads(3, 1, 8, 16, num_lm_heads=0, dtype=torch.float32)
    tree = [[0], [1], [0, 0], [2], [0, 1], [0, 0, 0]]
    save_heads(tmp_path / "heads", heads, {"tree": tree})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n' * 5)
    return [
        *("compare", "target", tmp_path / "heads"),
        *("--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "figures.json"),
    ]


def figures(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "figures.json").read_text())


def test_every_budget_is_measured_and_the_fastest_is_named(arguments, tmp_path, capsys):
    assert run(*arguments, "--budgets", "4", "2", "--rounds", "2") == 0
    document = figures(tmp_path)
    assert [row["num_draft_tokens"] for row in document["rows"]] == [2, 4]
    assert [row["ratio"] for row in document["rows"]] == pytest.approx([1 / 0.8, 2])
    assert all(len(row["ratios"]) == 2 and row["identical"] for row in document["rows"])
    assert document["fastest"] == 4
    assert document["dtype"] == "float32"
    assert document["automatic"]["ratio"] == pytest.approx(2.5)
    assert document["automatic"]["identical"]
    said = capsys.readouterr().out
    assert "Automatic trees (the default) run at 2.50x plain vLLM's speed: worth using." in said
    assert "The fastest fixed number, 4 draft nodes, gives 2.00x." in said
    assert "| 4 |" in said and "| **automatic** |" in said
    assert len(Engine.started) == 4  # plain vLLM once


@pytest.mark.parametrize(
    ("automatic", "fixed", "words"),
    [
        (1.2, 1.4, "1.20x plain vLLM's speed: worth using"),
        (0.9, 1.4, "0.90x plain vLLM's speed; a fixed number is faster"),
        (0.9, 0.8, "0.90x plain vLLM's speed: not worth using on this machine"),
    ],
)
def test_the_verdict_begins_with_the_default(automatic, fixed, words):
    row = {"differing_requests": 0, "requests": 2, "ratios": [1.0, 1.0]}
    document = {
        "rows": [row | {"num_draft_tokens": 4, "ratio": fixed}],
        "automatic": row | {"num_draft_tokens": None, "ratio": automatic},
        "fastest": 4,
        "dtype": "float32",
        "machine": {"cores": 2, "load_average_at_start": 0.1},
        "engine_args": {},
    }
    said = " ".join(comparison.conclusion(document))
    assert words in said and f"4 draft nodes, gives {fixed:.2f}x" in said
    document["machine"]["load_average_at_start"] = 7.0
    assert "load average of 7.0" in " ".join(comparison.conclusion(document)) and "7.0" not in said


def test_a_warm_up_group_is_not_counted(arguments, tmp_path, monkeypatch):
    groups = {None: [], 2: [], AUTOMATIC: []}
    measured = Engine.run

    def noted(self, prompts, concurrency, seed):
        groups[self.budget].append(len(prompts))
        return measured(self, prompts, concurrency, seed)

    monkeypatch.setattr(Engine, "run", noted)
    assert run(*arguments, "--budgets", "2", "--rounds", "1", "--batch", "4") == 0
    assert groups[2] == groups[AUTOMATIC] == [4, 4, 4, 2]
    assert groups[None] == 2 * groups[2]
    assert figures(tmp_path)["rows"][0]["requests"] == 10


def test_a_short_time_uses_fewer_prompts(arguments, tmp_path, capsys):
    assert run(*arguments, "--budgets", "2", "--seconds", "1") == 0
    document = figures(tmp_path)
    assert (document["prompts"], document["rounds"]) == (6, 1)
    assert document["rows"][0]["requests"] == 6
    said = " ".join(capsys.readouterr().err.split())
    assert "measuring 1 round of 6 prompts instead of 3 of 10" in said


def test_only_earlier_figures_are_replaced(arguments, tmp_path, capsys):
    options = [*arguments, "--budgets", "2", "--rounds", "1"]
    assert run(*options) == run(*options) == 0
    started = len(Engine.started)
    for text in ("notes", '{"rows": []}', "[1]"):
        (tmp_path / "figures.json").write_text(text)
        assert run(*options) == 2
        assert "holds no figures written by this command" in capsys.readouterr().err
        assert (tmp_path / "figures.json").read_text() == text
    assert run(*options, "--output", tmp_path / "prompts.jsonl") == 2
    assert len(Engine.started) == started, "before any engine starts"


@pytest.mark.parametrize(
    ("wrong", "dtype", "status"), [(4, "float32", 1), (4, "bfloat16", 0), (AUTOMATIC, "float32", 1)]
)
def test_other_tokens_fail_only_in_float32(
    arguments, tmp_path, monkeypatch, capsys, wrong, dtype, status
):
    monkeypatch.setattr(Engine, "wrong", wrong)
    monkeypatch.setattr(Engine, "dtype", dtype)
    assert run(*arguments, "--budgets", "2", "4") == status
    assert "requests differ" in capsys.readouterr().out
    good, *_, bad = comparison.all_rows(figures(tmp_path))[: 2 if wrong else 3]
    assert good["identical"] and not bad["identical"]
    assert bad["differences"][0]["position"] == 3


def test_prompts_that_the_target_cannot_answer(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "x = 1\n" * n}) + "\n" for n in (2, 3000, 3)))
    options = CompareOptions(target=TARGET, heads="h", prompts=data, max_tokens=10)
    prompts = comparison.prompts_of(options)
    with pytest.raises(PromptError, match=r"(?s)1 bad line.*line 2: \d+ tokens; .* is 2047"):
        comparison.answerable(options, prompts, SILENT)
    skipping = replace(options, on_bad_line="skip")
    kept, positions = comparison.answerable(skipping, prompts, SILENT)
    assert [prompt.index for prompt in kept] == [0, 2]
    assert len(positions) == 2 and min(positions) > 10
    with pytest.raises(PromptError, match="no prompts left"):
        comparison.answerable(skipping, prompts[1:2], SILENT)


def test_prompts_of_records_precede_the_answers(tmp_path):
    lines = [
        {"token_ids": [*range(20)], "generated": [[10, 20]], "temperature": 0.6},
        {"token_ids": [*range(10), 5, 5, 5], "generated": [[10, 13]], "temperature": 0.6},
        {"token_ids": [7] * 100, "generated": [[1, 100]], "temperature": 0.6},  # plain text
    ]
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = comparison.prompts_of(CompareOptions(target="t", heads="h", prompts=data))
    assert [prompt.token_ids for prompt in prompts] == [tuple(range(10)), (7,) * 32]
    assert [prompt.index for prompt in prompts] == [0, 2]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"method": "mtp", "tree": "dynamic"}, [4, 16, 59, None]),
        ({"method": "mtp", "tree": {"width": 2, "depth": 2}}, [4, 6, None]),
        ({"lookup": True}, [4, 16, 63, None]),
        ({"lookup": True, "num_speculative_tokens": 8}, [4, 8, None]),
    ],
)
def test_without_heads(config, sizes):
    options = CompareOptions(
        target="t", prompts=Path("p"), speculative_config=config, budgets=(4, 16, 100)
    )
    found = comparison.speculation(options)
    assert list(found) == sizes
    method = {"method": "medusa"} | config
    assert found == {n: method | ({} if n is None else {"budget": n}) for n in sizes}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "Pass HEADS, or --speculative-config"),
        ({"method": "mtp"}, "Pass HEADS, or --speculative-config"),
        ({"method": "ngram", "lookup": True}, "Pass HEADS, or --speculative-config"),
        ({"lookup": True, "num_speculative_tokens": "8"}, "num_speculative_tokens is '8'; use"),
    ],
)
def test_what_can_not_be_compared(config, words, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("one")
    options = ["--prompts", tmp_path / "p.txt", "--speculative-config", json.dumps(config)]
    assert run("compare", "target", *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--output", "nowhere/figures.json"], "no folder nowhere"),
        (["--speculative-config", '{"tree": [[0],[0,0],[0,0,0],[0,0,0,0]]}'], "there are 3 heads"),
        (["--speculative-config", '{"tree": "mc_sim"}'], "There is no preset or file 'mc_sim'"),
    ],
)
def test_errors_are_reported_before_an_engine_starts(arguments, capsys, change, words):
    assert run(*arguments, *change) == 2
    assert words in capsys.readouterr().err
    assert not Engine.started
