import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine

from vllm_medusa import cli
from vllm_medusa.offline import generate


class Engine(FakeEngine):
    """Stands in for `VllmEngine`; remembers what it was built from."""

    built: list[Any]
    limit = 10_000

    def __init__(self, settings: Any, sampling: Any, **options: Any):
        super().__init__(max_tokens=6, step_sizes=(2, 1), longest_prompt=self.limit)
        self.built.append((settings, sampling, options))
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    monkeypatch.setattr(generate, "VllmEngine", Engine)
    monkeypatch.setattr(Engine, "built", [], raising=False)
    monkeypatch.setattr(Engine, "limit", 10_000)
    return Engine


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"text {i}"} for i in range(6)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit:
        cli.main(["generate", *map(str, arguments)])
    return int(exit.value.code or 0)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_one_line_for_each_prompt(prompts: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out.jsonl"
    assert run("target", "-i", prompts, "-o", out, "--no-medusa") == 0
    assert sorted(r["request_id"] for r in records(out)) == [f"p{i}" for i in range(6)]
    assert {"text", "token_ids", "finish_reason", "acceptance"} <= records(out)[0].keys()
    assert "tokens per step" in capfd.readouterr().err


def test_options_reach_the_engine(prompts: Path, tmp_path: Path, engine: type[Engine]) -> None:
    options = ["--speculative-model", "heads", "--tree", '{"dense": [3, 2]}', "--acceptance"]
    options += ["typical", "--num-speculative-tokens", "5", "--temperature", "0.7", "--seed", "3"]
    options += ["--engine-args", '{"enforce_eager": true}', "--stop", "a", "--stop", "b"]
    assert run("target", "-i", prompts, "-o", tmp_path / "o.jsonl", *options) == 0
    ((settings, sampling, extra),) = engine.built
    assert settings.speculative_config == {
        "method": "medusa",
        "model": "heads",
        "tree": {"dense": [3, 2]},
        "acceptance": "typical",
        "num_speculative_tokens": 5,
    }
    assert settings.engine_args == {"enforce_eager": True}
    assert (sampling.temperature, sampling.stop) == (0.7, ("a", "b"))
    assert extra["seeded"] is True


def test_a_finished_job_starts_no_engine(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl")
    assert run(*arguments) == 0
    before = (tmp_path / "o.jsonl").read_bytes()
    assert run(*arguments) == 0
    assert "nothing to do" in capfd.readouterr().err
    assert len(engine.built) == 1
    assert (tmp_path / "o.jsonl").read_bytes() == before


def test_an_interrupted_job_goes_on(prompts: Path, tmp_path: Path, capfd: Any) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert run("target", "-i", prompts, "-o", whole, "--seed", 1) == 0
    assert run("target", "-i", prompts, "-o", broken, "--seed", 1) == 0
    content = broken.read_bytes()
    broken.write_bytes(content[: content.index(b"\n", len(content) // 2) + 20])  # a torn line
    assert run("target", "-i", prompts, "-o", broken, "--seed", 1) == 0
    assert "cut off an unfinished last line" in (err := capfd.readouterr().err)
    assert "resuming:" in err
    key = lambda r: r["index"]  # noqa: E731
    assert sorted(records(broken), key=key) == sorted(records(whole), key=key)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.5"], "sampling.temperature"),
        (["--tree", "mc_sim_7b_63"], "engine.speculative_config.tree"),
        (["--max-tokens", "7"], "sampling.max_tokens"),
        (["--seed", "2"], "sampling.seed"),
    ],
)
def test_other_settings_refuse_the_output(
    prompts: Path, tmp_path: Path, change: list[str], named: str, capfd: Any
) -> None:
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl")
    assert run(*arguments) == 0
    assert run(*arguments, *change) == 2
    assert f"{named} was" in capfd.readouterr().err
    assert run(*arguments, *change, "--overwrite") == 0


def test_another_model_at_the_same_place_refuses_the_output(
    prompts: Path, tmp_path: Path, capfd: Any
) -> None:
    weights = tmp_path / "target" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    arguments = (weights.parent, "-i", prompts, "-o", tmp_path / "o.jsonl", "--no-medusa")
    assert run(*arguments) == 0
    assert run(*arguments) == 0
    weights.write_bytes(b"two")
    assert run(*arguments) == 2
    assert "checkpoints.model was" in capfd.readouterr().err


@pytest.mark.parametrize("spelling", ["slash", "relative", "another place"])
def test_the_same_checkpoints_by_other_paths_are_the_same_job(
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: type[Engine],
    capfd: Any,
    spelling: str,
) -> None:
    target, heads = tmp_path / "target", tmp_path / "heads"
    for folder in (target, heads):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(folder.name.encode())
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


def test_another_tree_in_the_same_file_refuses_the_output(
    prompts: Path, tmp_path: Path, capfd: Any
) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0]]")
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl", "--tree", tree)
    assert run(*arguments, "--speculative-model", "heads") == 0
    tree.write_text("[[0], [1]]")
    assert run(*arguments, "--speculative-model", "heads") == 2
    assert "tree_sha256 was" in capfd.readouterr().err


def test_other_prompts_refuse_the_output(prompts: Path, tmp_path: Path, capfd: Any) -> None:
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl")
    assert run(*arguments) == 0
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    assert run(*arguments) == 2
    assert "prompts_sha256 was" in capfd.readouterr().err


def test_bad_lines_are_refused_or_skipped(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    prompts.write_text(prompts.read_text() + '\n{"prompt": 3}\n{"prompt": "last"}\n')
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl")
    assert run(*arguments) == 2
    assert "line 8: 'prompt' is 3" in capfd.readouterr().err
    assert engine.built == []
    assert run(*arguments, "--on-bad-line", "skip") == 0
    assert "line 8" in capfd.readouterr().err
    assert sorted(r["index"] for r in records(tmp_path / "o.jsonl")) == [0, 1, 2, 3, 4, 5, 7]


def test_a_prompt_that_the_engine_refuses(
    prompts: Path, tmp_path: Path, engine: type[Engine], capfd: Any
) -> None:
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "x" * 99}) + "\n")
    engine.limit = 20
    arguments = ("target", "-i", prompts, "-o", tmp_path / "o.jsonl", "--batch", 1)
    assert run(*arguments) == 2
    assert "line 7: the prompt has 99 tokens" in capfd.readouterr().err
    assert len(records(tmp_path / "o.jsonl")) == 6
    assert run(*arguments, "--on-bad-line", "skip") == 1
    assert [r["error"] for r in records(tmp_path / "o.jsonl") if "error" in r] == [
        "the prompt has 99 tokens"
    ]
    capfd.readouterr()
    assert run(*arguments, "--on-bad-line", "skip") == 1, "done, and still not well"
    assert "1 prompts could not be run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-medusa", "--tree", "x"], "contradicts"),
        (["--tree", "{not json"], "isn't: Expecting"),
        (["--format", "text", "--column", "c"], "drop it"),
    ],
)
def test_contradictions_are_refused(
    prompts: Path, tmp_path: Path, options: list[str], message: str, capfd: Any
) -> None:
    assert run("target", "-i", prompts, "-o", tmp_path / "o.jsonl", *options) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "'0' is not allowed; use a whole number from 1"),
        (["--temperature", "warm"], "'warm' is not allowed; use a number from 0"),
        (["--top-p", "1.5"], "'1.5' is not allowed; use a number above 0 to 1"),
        (["--engine-args", "[1]"], "use a JSON object"),
    ],
)
def test_values_out_of_bounds_are_refused(
    prompts: Path, tmp_path: Path, options: list[str], message: str, capfd: Any
) -> None:
    assert run("target", "-i", prompts, "-o", tmp_path / "o.jsonl", *options) == 2
    assert message in capfd.readouterr().err


def test_an_empty_file_is_refused(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "p.txt").write_text("\n\n")
    assert run("target", "-i", tmp_path / "p.txt", "-o", tmp_path / "o.jsonl") == 2
    assert "no prompts in it" in capfd.readouterr().err


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setenv(name, os.environ.get(name, "0"))
