import json
import re
import shutil
from pathlib import Path

import pytest

from vllm_medusa import cli
from vllm_medusa.adapt import checks, job

TARGET = Path(__file__).parents[3] / "demo" / "target"


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
    """Run with changes that must be refused before any stage; returns what is said."""
    begun = lambda *_: pytest.fail("it was not refused")  # noqa: E731
    monkeypatch.setattr(job, "WorkFolder", begun)

    def run(*changes):
        with pytest.raises(SystemExit) as exit:
            cli.main([*arguments, *changes])
        assert exit.value.code == 2
        assert not (tmp_path / "work").exists()
        return re.sub(r"\s+", " ", capfd.readouterr().err)

    return run


def test_bad_lines_are_told_with_their_numbers(refused, tmp_path):
    with (tmp_path / "prompts.jsonl").open("ab") as file:
        file.write(b'{"promt": "a"}\n{"prompt": "\xff"}\n')
    said = refused()
    assert "line 10: no key" in said
    assert "line 11: not UTF-8" in said
    assert "--on-bad-line skip" in said


def test_too_few_prompts(refused, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 20)
    assert "1 different prompts; at least 2" in refused()


@pytest.mark.parametrize("kind", ["file", "foreign"])
def test_an_output_that_is_something_else_is_left_alone(refused, tmp_path, kind):
    output = tmp_path / "heads"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "mine").touch()
    said = refused("--overwrite")
    assert "name" in said.lower()
    assert output.exists()


def test_heads_of_another_adapt_are_left_alone(refused, tmp_path):
    output = tmp_path / "heads"
    output.mkdir()
    (output / "report.json").write_text('{"key": "another"}')
    assert "--overwrite" in refused()


def test_files_of_others_beside_heads_are_not_overwritten(refused, tmp_path):
    output = tmp_path / "heads"
    output.mkdir()
    (output / "report.json").write_text('{"key": "another"}')
    (output / "notes.txt").write_text("mine")
    said = refused("--overwrite")
    assert "also holds notes.txt, which --overwrite would delete" in said
    assert "move them away" in said
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("which", ["target", "prompts"])
def test_what_is_read_is_not_overwritten(arguments, refused, tmp_path, which):
    output = tmp_path / "heads"
    (output / "target").mkdir(parents=True)
    (output / "report.json").write_text('{"key": "another"}')
    if which == "target":
        arguments[1] = str(output / "target")
    else:
        moved = (tmp_path / "prompts.jsonl").rename(output / "target" / "prompts.jsonl")
        arguments[3] = str(moved)
    assert "which is read, is in --output" in refused("--overwrite")


def test_a_folder_that_is_missing(refused, tmp_path):
    assert "no folder nowhere" in refused("--output", "nowhere/heads")


@pytest.mark.parametrize("spelling", [".", "..", "/", "../here"])
def test_the_current_folder_as_the_output(arguments, tmp_path, monkeypatch, refused, spelling):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    work = arguments.index("--work")
    del arguments[work : work + 2]
    said = refused("--output", spelling)
    assert f"--output {spelling} is the folder that this was started in" in said
    assert "Name a folder in it, such as" in said
    assert not list(here.iterdir())


def test_a_link_that_leads_nowhere_as_the_output(refused, tmp_path):
    (tmp_path / "heads").symlink_to(tmp_path / "nowhere" / "heads")
    assert f"no folder {tmp_path / 'nowhere'}" in refused()


@pytest.mark.parametrize("place", ["heads", "heads/work", "link/work"])
def test_a_work_folder_in_the_output(refused, tmp_path, place):
    (tmp_path / "link").symlink_to(tmp_path / "heads")
    said = refused("--work", str(tmp_path / place))
    assert f"--work {tmp_path / place} is in --output" in said
    assert "Name another --work, or none" in said


def test_a_target_that_is_none(refused, arguments, tmp_path):
    broken = tmp_path / "target"
    broken.mkdir()
    arguments[1] = str(broken)
    assert "not a model that can be read" in refused()
    shutil.copy(TARGET / "config.json", broken)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, broken)
    assert "weights" in refused()


def test_missing_packages_are_named_with_their_extra(refused, monkeypatch):
    known = checks.find_spec
    gone = ("matplotlib", "vllm")
    monkeypatch.setattr(checks, "find_spec", lambda n: None if n in gone else known(n))
    said = refused()
    assert "matplotlib, vllm" in said or "vllm, matplotlib" in said
    assert "pip install 'vllm-medusa[cpu,train]'" in said


def test_a_disk_that_is_too_small(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    assert "GB free" in refused()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--heldout-share", "0.6"],
            "--heldout-share: '0.6' is not allowed; use a number above 0 to 0.5",
        ),
        (
            ["--budgets", "8", "256"],
            "--budgets: '256' is not allowed; use a whole number from 1 to 255",
        ),
        (["--num-draft-tokens", "256"], "--num-draft-tokens: '256' is not allowed"),
        (["--num-heads", "9", "--max-tokens", "10"], "at least 11 tokens"),
        (["--learning-rate", "nan"], "--learning-rate"),
        (["--train-args=--no-such-option 3"], "--no-such-option"),
        (["--train-args=--keep-cache"], "--keep-cache needs --cache"),
    ],
)
def test_options_that_a_later_stage_would_refuse(refused, options, words):
    assert words in refused(*options)


@pytest.mark.parametrize(
    ("given", "name", "remedy"),
    [
        ("--method medusa-2", "method", "give it to adapt itself"),
        ("--meth=medusa-2", "method", "give it to adapt itself"),
        ("--seed 3", "seed", "give it to adapt itself"),
        ("--dtype bfloat16", "dtype", "give it to adapt itself"),
        ("--heldout-share 0.2", "heldout-share", "give it to adapt itself"),
        ("--num-heads 3", "num-heads", "give it to adapt itself"),
        ("--epochs 9", "epochs", "give it to adapt itself"),
        ("--output elsewhere", "output", "leave it out"),
        ("-i mine.jsonl", "data", "leave it out"),
        ("--heldout mine.jsonl", "heldout", "leave it out"),
        ("--overwrite", "overwrite", "leave it out"),
    ],
)
def test_train_args_that_adapt_sets_itself(refused, given, name, remedy):
    assert f"--train-args has --{name}, which adapt decides: {remedy}" in refused(
        f"--train-args={given}"
    )


def test_train_args_that_leave_no_target_to_serve(refused):
    said = refused("--method", "medusa-2", "--train-args=--save adapter")
    assert "--train-args has --save, which adapt decides: leave it out" in said


def test_finished_heads_are_not_made_again(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(checks.Plan, "key", "the same")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "report.json").write_text('{"key": "the same"}')
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 0
    assert "nothing to do" in capfd.readouterr().err
    assert not (tmp_path / "work").exists()
