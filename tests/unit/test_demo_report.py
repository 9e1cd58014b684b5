import io

import pytest
from rich.console import Console
from support.fake_engine import FakeEngine

from demo import report
from vllm_medusa.offline.batch import Answer, Result
from vllm_medusa.offline.in_turn import InTurn, run_in_turn
from vllm_medusa.offline.prompts import Prompt

PROMPTS = [Prompt(i, i + 1, f"r{i}", text=f"prompt {i}") for i in range(6)]
ANSWER = Answer(
    text="abcdefg", token_ids=list(range(7)), delivered=[1, 3, 2, 1], finish_reason="length"
)


def terminal(colour: bool) -> Console:
    system = "standard" if colour else None
    options = {"force_terminal": colour, "color_system": system, "highlight": False}
    return Console(file=io.StringIO(), width=80, **options)


def output(console: Console) -> str:
    return console.file.getvalue()


def compared(wrong_at: int | None = None) -> InTurn:
    candidate = FakeEngine(step_sizes=(3, 1), wrong_at=wrong_at)
    return run_in_turn(FakeEngine(), candidate, PROMPTS, concurrency=2, seed=1)


def test_the_last_token_of_a_step_is_the_targets_own():
    assert report.draft_flags([1, 3, 2, 1]) == [False, True, True, False, True, False, False]


def test_drafts_stand_between_marks_or_in_colour():
    cut = Answer(text="ab", token_ids=[0, 1], delivered=[2], finish_reason="length")
    assert report.marked_text(cut, ["a", "b"], colour=False).plain == "«a»b"
    assert report.marked_text(ANSWER, list("abcdefg"), colour=False).plain == "a«bc»d«e»fg"
    text = report.marked_text(ANSWER, list("abcdefg"), colour=True)
    assert text.plain == "abcdefg"
    drafted = [text.plain[s.start : s.end] for s in text.spans if s.style == report.DRAFT_STYLE]
    assert drafted == ["b", "c", "e"]


@pytest.mark.parametrize("colour", [True, False])
def test_texts_show_prompt_legend_and_steps(colour):
    console = terminal(colour)
    result = Result(PROMPTS[0], (ANSWER,))
    report.texts(console, [result], lambda ids: [chr(97 + i) for i in ids])
    shown = output(console)
    assert "prompt 0" in shown
    assert "drafted by the heads and accepted" in shown
    assert "7 tokens in 4 steps" in shown
    assert ("\x1b[" in shown) == colour
    assert ("«bc»" in shown) == (not colour)


def test_markup_in_generated_text_is_not_interpreted():
    console = terminal(False)
    prompt = Prompt(0, 1, "m", text="x[/]")
    report.texts(console, [Result(prompt, (ANSWER,))], lambda ids: ["[bold]"] * len(ids))
    assert "[bold]" in output(console)
    assert "x[/]" in output(console)


def test_identical_runs_are_called_so():
    console = terminal(False)
    rows = [report.Row("sampled", compared())]
    report.figures(console, rows)
    report.histogram(console, rows[0])
    assert report.verdict(console, rows)
    shown = output(console)
    tokens = rows[0].comparison.baseline.tokens
    assert f"IDENTICAL: all {tokens} tokens of 6 requests" in shown
    assert "6/6" in shown
    assert "100.0%" not in shown  # drafts were accepted in some steps


def test_one_different_token_is_called_so():
    console = terminal(False)
    rows = [report.Row("sampled", compared()), report.Row("greedy", compared(wrong_at=1))]
    assert not report.verdict(console, rows)
    shown = output(console)
    assert "DIFFERENT" in shown
    assert "IDENTICAL" not in shown
    assert "greedy, prompt r" in shown
    assert "at token 1" in shown
