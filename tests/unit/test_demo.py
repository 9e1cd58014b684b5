"""The demo from a recording: its output, pictures and files, and its exit status."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.assets import HEADS, TARGET

from demo.__main__ import main
from demo.recording import Recording, Run, Step, Take
from demo.replay import frame


def take(steps: list[tuple[float, str]]) -> Take:
    """Each letter is a token; its id is its position."""
    return Take(
        tuple(Step(at, tuple(letters)) for at, letters in steps),
        tuple(range(sum(len(letters) for _, letters in steps))),
        "length",
    )


TAKE = take([(0.2, "a"), (0.3, "bcd"), (0.4, "ef"), (0.5, "g")])
PLAIN = take([(0.1 * (i + 1), letter) for i, letter in enumerate("abcdefg")])
RUN = Run("p0", "Say [/] & <this>", 0, PLAIN, TAKE)
RECORDING = Recording(
    "target",
    "drafter",
    "2 cores",
    tuple(Run(f"p{i}", f"prompt {i}", t, PLAIN, TAKE) for t in (0, 0.7) for i in range(3)),
)


def wrong(recording: Recording) -> Recording:
    first, *others = recording.runs
    drafted = replace(first.drafted, token_ids=(0, 1, 9, 3, 4, 5, 6))
    return replace(recording, runs=(replace(first, drafted=drafted), *others))


@pytest.fixture
def run(tmp_path):
    def run(recording: Recording, *more: str) -> int:
        recording.save(tmp_path / "r.json")
        return main(["--from", str(tmp_path / "r.json"), *more])

    return run


def test_equal_tokens_exit_with_0(run, capsys):
    assert run(RECORDING) == 0
    shown = capsys.readouterr().out
    assert "IDENTICAL: all 42 tokens of 6 answers" in shown
    rows = [re.findall(r"[\w.>/-]+", line) for line in shown.splitlines() if "3/3" in line]
    figures = ["10.0", "14.0", "1.40x", "2.00", "18", "->", "9", "3/3"]
    assert rows == [["T", temperature, *figures] for temperature in ("0", "0.7")]
    assert "a«bc»d«e»fg" in shown and "prompt 0" in shown


@pytest.mark.parametrize(("slower", "warns"), [(1.0, False), (0.5, True), (4.0, True)])
def test_implausible_ratios_are_named(run, capsys, slower, warns):
    """Plain decoding takes 0.7 s times ``slower``; the drafts have 1.40x of 1.0, and tau 2."""
    steps = [(slower * 0.1 * (i + 1), letter) for i, letter in enumerate("abcdefg")]
    runs = tuple(replace(each, plain=take(steps)) for each in RECORDING.runs)
    assert run(replace(RECORDING, runs=runs)) == 0
    assert ("below 1x or far above tau" in capsys.readouterr().out) == warns


def test_a_wrong_token_exits_with_1(run, capsys):
    assert run(wrong(RECORDING)) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT: 1 of 6 answers" in shown
    assert "p0, T 0: from token 2 on" in shown
    assert "2/3" in shown and "3/3" in shown


@pytest.mark.parametrize("option", ["--target", "--drafter", "--prompts", "--from"])
def test_missing_files_are_named(option, tmp_path, capfd):
    there = [word for name in ("--target", "--drafter") for word in (name, str(tmp_path))]
    assert main([*there, option, str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}" in capfd.readouterr().err


def test_files_are_written(run, tmp_path):
    assert run(RECORDING, "--json", str(tmp_path / "j"), "--record", str(tmp_path / "p.svg")) == 0
    assert json.loads((tmp_path / "j").read_text()) == json.loads((tmp_path / "r.json").read_text())
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("option", ["--json", "--record"])
def test_unwritable_outputs_are_refused_first(run, tmp_path, capfd, option):
    assert run(RECORDING, option, str(tmp_path / "none" / "file")) == 2
    captured = capfd.readouterr()
    assert "none" in captured.err and not captured.out


@pytest.mark.parametrize("option", ["--json", "--record"])
def test_other_files_are_not_replaced(run, tmp_path, capfd, option):
    (tmp_path / "notes").write_text("mine")
    assert run(RECORDING, option, str(tmp_path / "notes")) == 2
    captured = capfd.readouterr()
    assert "notes" in captured.err and not captured.out
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--speculative-config", '{"treee": 1}'], "did you mean 'tree'"),
        (["--drafter", TARGET], "holds no Medusa head"),
        ([], "hidden size 256; the target has 32"),
    ],
)
def test_a_drafter_that_does_not_fit_starts_no_engine(tmp_path, monkeypatch, capfd, more, words):
    monkeypatch.setattr("demo.__main__.record", lambda *_: pytest.fail("it was started"))
    small = {"hidden_size": 32, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(small))
    (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    assert main(["--target", str(tmp_path), "--drafter", HEADS, *more]) == 2
    assert words in (said := capfd.readouterr().err), said


def shown_at(clock: float) -> str:
    size = {"width": 100, "height": 30}
    console = Console(file=io.StringIO(), **size, force_terminal=True, color_system=None)
    console.print(frame(console, RUN, clock, "eagle3"))
    return console.file.getvalue()


def test_a_frame_shows_the_tokens_of_both_engines_at_its_time():
    early, late = shown_at(0.35), shown_at(0.75)
    assert re.search(r"│ abc +││ abcd +│", early)
    assert "0.3 s, 3 tokens, 9 tokens/s" in early and "0.3 s, 4 tokens, 11 tokens/s" in early
    assert "the speed" not in early
    assert re.search(r"│ abcdefg +││ abcdefg +│", late)
    assert "0.5 s, 7 tokens, 14 tokens/s, done" in late
    assert "1.40x the speed, the same 7 tokens" in late
    assert "Say [/] & <this>" in late
    assert len(early.splitlines()) == len(late.splitlines())


@pytest.mark.parametrize(
    ("change", "position"),
    [
        ({"token_ids": (0, 1, 9, 3, 4, 5, 6)}, 2),
        ({"token_ids": (0, 1, 2, 3, 4, 5)}, 6),
        ({"finish_reason": "stop"}, 7),
    ],
)
def test_a_different_answer_is_not_identical(change, position):
    assert RUN.identical and "the same 7 tokens" in RUN.outcome
    wrong = replace(RUN, drafted=replace(RUN.drafted, **change))
    assert not wrong.identical
    assert wrong.first_difference == position
    assert wrong.outcome == f"DIFFERENT from token {position} on"


def test_another_file_is_refused(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({"runs": []}))
    with pytest.raises(ValueError, match="not a recording"):
        Recording.load(tmp_path / "r.json")
