import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.assets import HEADS
from support.commands import said

pytestmark = pytest.mark.usefixtures("engine")
run = partial(commands.run, "generate")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"text {i}"} for i in range(6)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def arguments(prompts, tmp_path):
    return "target", "-i", prompts, "-o", tmp_path / "o.jsonl"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_one_line_for_each_prompt(arguments, tmp_path, capfd):
    assert run(*arguments) == 0
    found = records(tmp_path / "o.jsonl")
    assert sorted(r["request_id"] for r in found) == [f"p{i}" for i in range(6)]
    assert {"text", "token_ids", "finish_reason", "acceptance"} <= found[0].keys()
    text = said(capfd)
    assert "tokens per step" in text and "plain vLLM, without speculation" in text
    assert "starting vLLM (about 75 s)" in text


def test_options_reach_the_engine(arguments, engine):
    config = {"tree": {"dense": [3, 2]}, "acceptance": "typical", "num_speculative_tokens": 5}
    options = ["--speculative-model", HEADS, "--speculative-config", json.dumps(config)]
    options += ["--temperature", "0.7", "--seed", "3", "--stop", "a", "b"]
    options += ["--engine-args", '{"enforce_eager": true}']
    assert run(*arguments, *options) == 0
    ((settings, sampling, extra),) = engine.built
    assert settings["speculative_config"] == {"method": "medusa", "model": HEADS, **config}
    assert settings["enforce_eager"] is True
    assert (sampling.temperature, sampling.stop) == (0.7, ("a", "b"))
    assert extra["seeded"] is True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.5"], "sampling.temperature"),
        (["--speculative-config", '{"tree": "mc_sim_7b_63"}'], "engine.speculative_config.tree"),
        (["--seed", "2"], "sampling.seed"),
        (["--engine-args", '{"enforce_eager": true}'], "engine.enforce_eager"),
        ("target/model.safetensors", "checkpoints.model"),
        ("tree.json", "tree_sha256"),
        ("prompts.jsonl", "prompts_sha256"),
    ],
)
def test_other_settings_or_files_are_refused(prompts, tmp_path, change, named, capfd):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/model.safetensors").write_text("one")
    (tmp_path / "tree.json").write_text("[[0]]")
    config = json.dumps({"tree": str(tmp_path / "tree.json")})
    arguments = ("-i", prompts, "-o", tmp_path / "o.jsonl", "--speculative-config", config)
    arguments = (tmp_path / "target", *arguments, "--speculative-model", HEADS)
    assert run(*arguments) == run(*arguments) == 0
    if isinstance(change, str):  # another file at the same place
        other = {"tree.json": "[[0], [1]]", "prompts.jsonl": '{"prompt": "one more"}\n'}
        (tmp_path / change).write_text(other.get(change, "two"))
        change = []
    assert run(*arguments, *change) == 2
    assert f"{named} was" in said(capfd)
    assert run(*arguments, *change, "--overwrite") == 0


@pytest.mark.parametrize("spelling", ["slash", "relative", "another place"])
def test_the_same_checkpoints_under_other_paths_resume(
    prompts, tmp_path, monkeypatch, engine, heads, capfd, spelling
):
    target = tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"target")
    rest = ("-i", prompts, "-o", tmp_path / "o.jsonl")
    assert run(target, "--speculative-model", heads, *rest) == 0
    place = str(target), str(heads)
    if spelling == "slash":
        place = f"{target}/", f"{heads}/"
    elif spelling == "relative":
        monkeypatch.chdir(target)
        place = ".", "../heads"
    else:
        target.rename(tmp_path / "moved")
        place = str(tmp_path / "moved"), str(heads)
    assert run(place[0], "--speculative-model", place[1], *rest) == 0, capfd.readouterr().err
    assert "nothing to do" in capfd.readouterr().err
    assert len(engine.built) == 1
    assert run(place[1], "--speculative-model", place[0], *rest) == 2
    assert run(place[0], *rest) == 2
    assert run(place[0], "--speculative-model", "another", *rest) == 2


def test_bad_lines_are_refused_or_skipped(arguments, prompts, tmp_path, engine, capfd):
    prompts.write_text(prompts.read_text() + '\n{"prompt": 3}\n{"prompt": "last"}\n')
    assert run(*arguments) == 2
    assert "line 8: prompt is 3" in said(capfd)
    assert engine.built == []
    assert run(*arguments, "--on-bad-line", "skip") == 0
    assert "line 8" in said(capfd)
    assert sorted(r["index"] for r in records(tmp_path / "o.jsonl")) == [0, 1, 2, 3, 4, 5, 7]


def test_a_prompt_refused_by_the_engine(arguments, prompts, tmp_path, engine, capfd):
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "x" * 99}) + "\n")
    engine.limit = 20
    assert run(*arguments, "--batch", 1) == 2
    assert "line 7: the prompt has 99 tokens" in said(capfd)
    assert len(records(tmp_path / "o.jsonl")) == 6
    for _ in range(2):  # finished the second time, but still with an error
        assert run(*arguments, "--batch", 1, "--on-bad-line", "skip") == 1
    assert "1 prompt could not be run" in said(capfd)
    errors = [r["error"] for r in records(tmp_path / "o.jsonl") if "error" in r]
    assert errors == ["the prompt has 99 tokens"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "invalid JSON: key must be"),
        ({"tree": "mc_sim"}, "There is no preset or file 'mc_sim'"),
        ({"acceptance": "exact"}, 'mode is \'exact\'; use "lossless" or "typical"'),
        ({"budget": 7, "tree": "mc_sim_7b_63"}, 'a static "tree" is set too'),
        ({"method": "medua"}, "unknown method 'medua' (did you mean 'medusa'?)"),
        ({}, "do not fit the target: hidden size 256; the target has 512"),
        ({"method": "eagle3", "tree": "dynamic"}, "holds no EAGLE drafter"),
    ],
)
def test_speculation_that_cannot_work_is_refused(
    arguments, tmp_path, engine, config, message, capfd
):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text('{"hidden_size": 512}')
    text = config if isinstance(config, str) else json.dumps(config)
    options = ("--speculative-model", HEADS, "--speculative-config", text)
    assert run(tmp_path / "target", *arguments[1:], *options) == 2
    assert message in said(capfd)
    assert not engine.built
    assert not (tmp_path / "o.jsonl").exists()


def test_engine_arguments_have_no_speculation(arguments, capfd):
    assert run(*arguments, "--engine-args", '{"speculative_config": {"budget": 7}}') == 2
    assert "Use --speculative-model" in said(capfd)
    assert run(*arguments, "--engine-args", "[1]") == 2
    assert "input should be an object" in said(capfd)
