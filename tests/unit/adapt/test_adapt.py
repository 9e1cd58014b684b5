"""What an adapt run refuses before any stage, its plan, and what the plan requires."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.assets import ASSETS

from vllm_medusa.adapt import pipeline, plan
from vllm_medusa.adapt.options import AdaptOptions
from vllm_medusa.adapt.plan import Work
from vllm_medusa.offline import defaults
from vllm_medusa.offline.defaults import Length, TargetSizes
from vllm_medusa.training.options import HeadOptions

TARGET = ASSETS / "target"


@pytest.fixture
def arguments(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"<s>def f{i}("}) + "\n" for i in range(9)))
    return [
        *("adapt", str(TARGET), "--prompts", str(prompts)),
        *("--output", str(tmp_path / "heads"), "--work", str(tmp_path / "work")),
    ]


@pytest.fixture
def refused(arguments, tmp_path, monkeypatch, capfd):
    """Run with changes that must be refused before any stage; returns the messages."""
    fail_if_reached = lambda *_: pytest.fail("it was not refused")  # noqa: E731
    monkeypatch.setattr(pipeline, "WorkFolder", fail_if_reached)

    def run(*changes):
        assert commands.run(*arguments, *changes) == 2
        assert not (tmp_path / "work").exists()
        return commands.said(capfd)

    return run


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (b'{"promt": "a"}\n{"prompt": "\xff"}\n', ["line 10: no key", "line 11: not UTF-8"]),
        (
            json.dumps({"prompt": "<s>def f(a):\n" * 5000}).encode(),
            ["line 10:", "the target's limit"],
        ),
    ],
)
def test_invalid_lines_are_reported_with_their_numbers(refused, tmp_path, more, words):
    with (tmp_path / "prompts.jsonl").open("ab") as file:
        file.write(more)
    said = refused()
    assert all(word in said for word in [*words, "--on-bad-line skip"]), said


def test_too_few_prompts(refused, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 20)
    assert "1 distinct prompt; at least 2" in refused()


@pytest.fixture
def output(tmp_path):
    """Heads of another adapt run in this one's output."""
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "report.json").write_text('{"key": "another"}')
    return tmp_path / "heads"


def test_a_foreign_output_is_left_unchanged(refused, output):
    assert "--overwrite" in refused()
    (output / "notes.txt").write_text("mine")
    said = refused("--overwrite")
    assert "also holds notes.txt, which --overwrite would delete" in said
    assert "move them away" in said
    assert (output / "notes.txt").read_text() == "mine"
    (output / "report.json").unlink()
    assert "choose" in refused("--overwrite").lower()
    file = output.rename(output.with_name("aside")) / "notes.txt"
    file.rename(output)
    assert f"{output} is a file. Choose a folder" in refused("--overwrite")
    assert output.read_text() == "mine"


@pytest.mark.parametrize("which", ["target", "prompts"])
def test_inputs_are_not_overwritten(arguments, refused, output, tmp_path, which):
    (output / "target").mkdir()
    if which == "target":
        arguments[1] = str(output / "target")
    else:
        moved = (tmp_path / "prompts.jsonl").rename(output / "target" / "prompts.jsonl")
        arguments[3] = str(moved)
    where = "the target" if which == "target" else "--prompts"
    assert f"{where} ({output}" in refused("--overwrite")


@pytest.mark.parametrize("spelling", [".", "..", "/", "../here"])
def test_the_current_folder_as_the_output(arguments, tmp_path, monkeypatch, refused, spelling):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    work = arguments.index("--work")
    del arguments[work : work + 2]
    said = refused("--output", spelling)
    assert f"the current folder ({here}) is in --output {spelling}, whose" in said
    assert not list(here.iterdir())


@pytest.mark.parametrize("place", ["heads", "heads/work", "link/work"])
def test_a_work_folder_in_the_output(refused, tmp_path, place):
    (tmp_path / "link").symlink_to(tmp_path / "heads")
    said = refused("--work", str(tmp_path / place))
    assert f"--work ({tmp_path / place}) is in --output" in said


def test_an_invalid_target(refused, arguments, tmp_path):
    broken = tmp_path / "target"
    broken.mkdir()
    arguments[1] = str(broken)
    assert "can't be read as a model" in refused()
    (broken / "model.gguf").write_bytes(b"GGUF")
    assert "an existing folder with config.json" in refused()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, broken)
    assert "weights" in refused()
    arguments[1] = str(broken / "model.gguf")
    said = refused()
    assert "an existing folder with config.json" in said and "gguf_file=NAME" in said


def test_a_dry_run_prints_the_plan(arguments, tmp_path, capfd):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "<s>def f(a):\n" * 5000}) + "\n")
        file.write(json.dumps({"turns": ["def g("]}) + "\n")
    assert commands.run(*arguments, "--on-bad-line", "skip", "--dry-run") == 0
    assert not (tmp_path / "work").exists()
    said = commands.said(capfd)
    assert "skipping 1 bad line:" in said
    assert "compare vLLM with it against plain vLLM: about 10 min" in said
    assert "has no chat template, so 1 conversation of" in said
    assert "as plain text, without" not in said
    assert "10 texts of up to 512 new tokens" in said
    assert "GB of memory)" in said and "(eager," in said
    assert "GB of disk in" in said


def test_insufficient_memory(refused, monkeypatch):
    monkeypatch.setattr(defaults, "available_memory", lambda: 10**9)
    said = refused()
    assert "GB of memory needed" in said and "1.0 GB available" in said


def test_missing_packages_are_named_with_their_extra(refused, monkeypatch):
    known = plan.find_spec
    gone = ("matplotlib", "vllm")
    monkeypatch.setattr(plan, "find_spec", lambda n: None if n in gone else known(n))
    said = refused()
    assert "vllm, matplotlib" in said
    assert "pip install 'vllm-medusa[cpu,train]'" in said


def test_insufficient_disk_space(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "GB free" in refused()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-model-len", "10"], "the target's limit before an answer is 3"),
        (["--start-heads", "/none"], "no such file or folder"),
        (["--num-heads", "9", "--max-tokens", "10"], "at least 11 tokens"),
        (["--draft-vocab", "1"], "fewer than 16 tokens drafts nothing"),
        (["--method", "medusa-2"], "not with hydra. Add --drafter medusa"),
        (["--drafter", "eagle3", "--num-layers", "2"], "EAGLE-3 has one decoder layer"),
    ],
)
def test_options_that_cannot_work(refused, options, words):
    assert words in refused(*options)


def test_finished_heads_are_not_trained_again(arguments, output, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(plan.Plan, "key", "another")
    assert commands.run(*arguments) == 0
    assert "nothing to do" in commands.said(capfd)
    assert not (tmp_path / "work").exists()


SIZES = TargetSizes(134_500_000, 269_000_000, 23040, 8192)


def work(prompt: int, max_tokens: int, samples: int = 1, room: int = 1 << 31, **more: Any) -> Work:
    files = {"prompts": Path("p.jsonl"), "output": Path("heads")}
    more |= {"max_tokens": max_tokens, "samples": samples}
    options = AdaptOptions(target="target", **files, **more)
    target = {"hidden_size": 576, "vocab_size": 49152}
    return Work(options, target, SIZES, [Length(prompt), Length(9 * prompt, 2)], room)


def test_answers_fit_the_targets_context() -> None:
    found = work(100, 512, 2, room=1000)
    assert (found.prompts, found.written) == (2000, 2 * (512 + 100))


def test_states_are_cached_for_generated_tokens_up_to_the_limit() -> None:
    def disk(written: int, **more: Any) -> tuple[int, int]:
        return work(6_800, written // 3, dtype="bfloat16", **more).disk_bytes()

    files, states = disk(136_002)
    assert states == 136_002 * 576 * 2
    own = disk(136_002, heads=HeadOptions(lm_heads="own"))[0]
    assert files < 0.3e9 < 3e9 < own < 6e9  # the target's LM head is not copied
    prompts_and_more_layers = disk(136_002, heads=HeadOptions(kind="eagle3"))[1]
    assert prompts_and_more_layers == 204_002 * 4 * 576 * 2
    assert disk(10**9)[1] == 50e9


def test_a_faster_machine_takes_less_but_measures_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(flops: float, **more: Any) -> dict[str, float]:
        monkeypatch.setattr(plan, "_speeds", lambda _: (flops, 1e10))
        return work(6_800, 45_334, **more).seconds(eager=False)

    slow, fast = seconds(1e10), seconds(2e10)
    assert list(slow) == ["distill", "train", "compare"]
    forward = 204_002 * 2 * SIZES.values / 1e10  # a multiplication and an addition per weight
    assert slow["distill"] == pytest.approx(75 + forward) and slow["train"] > 2 * forward
    assert slow["train"] == 2 * fast["train"]
    assert slow["distill"] > fast["distill"] > slow["distill"] / 2  # start-up takes constant time
    assert slow["compare"] == fast["compare"] == pytest.approx(600)
    medusa = HeadOptions(kind="medusa")
    joint = seconds(1e10, method="medusa-2", heads=medusa)
    assert joint["train"] > seconds(1e10, heads=medusa)["train"]
    monkeypatch.undo()
    assert all(speed > 1e8 for speed in plan._speeds("float32"))
