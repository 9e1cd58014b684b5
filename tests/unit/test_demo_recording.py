"""The demo's recording: the display over time, figures, and the file."""

import json
from dataclasses import replace

import pytest
from support.recordings import RECORDING, RUN, TAKE, take

from demo.recording import Recording, Span, joined


def test_the_last_token_of_a_step_is_the_targets():
    assert joined(TAKE.steps) == [
        Span("a", False),
        Span("bc", True),
        Span("d", False),
        Span("e", True),
        Span("fg", False),
    ]


def test_a_step_is_shown_when_it_ended():
    texts = [
        "".join(span.text for span in joined(TAKE.done(clock)))
        for clock in (0, 0.199, 0.2, 0.3, 0.5, 9)
    ]
    assert texts == ["", "", "a", "abcd", "abcdefg", "abcdefg"]


def test_speed_is_up_to_the_clock_and_is_final_at_the_end():
    assert TAKE.tokens_per_second(0.1) == 0
    assert TAKE.tokens_per_second(0.25) == pytest.approx(1 / 0.25)
    assert TAKE.tokens_per_second(0.3) == pytest.approx(4 / 0.3)
    assert TAKE.tokens_per_second(9) == pytest.approx(7 / 0.5)
    assert TAKE.status(0.1) == "0.1 s, 0 tokens, 0 tokens/s"
    assert TAKE.status(9) == "0.5 s, 7 tokens, 14 tokens/s, done"


def test_figures_sum_over_the_prompts_of_a_temperature():
    cold, warm = RECORDING.figures()
    assert (cold.temperature, warm.temperature) == (0, 0.7)
    assert (cold.requests, warm.requests) == (3, 3)
    assert cold.plain_speed == pytest.approx(7 / 0.7)
    assert cold.drafted_speed == pytest.approx(7 / 0.5)
    assert cold.ratio == pytest.approx(1.4)
    assert (cold.plain_steps, cold.drafted_steps) == (3 * 6, 3 * 3)
    assert cold.tau == pytest.approx(2.0)  # 6 tokens after the first, in 3 steps


def test_shown_runs_alternate_temperatures():
    shown = [(run.name, run.temperature) for run in RECORDING.shown(3)]
    assert shown == [("p0", 0), ("p1", 0.7), ("p2", 0)]
    assert RECORDING.shown(0) == []
    assert len(RECORDING.shown(9)) == 3


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


def test_a_file_contains_everything(tmp_path):
    RECORDING.save(tmp_path / "r.json")
    assert Recording.load(tmp_path / "r.json") == RECORDING


def test_another_file_is_refused(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({"runs": []}))
    with pytest.raises(ValueError, match="not a recording"):
        Recording.load(tmp_path / "r.json")


def test_a_single_token_has_a_speed_but_no_tau():
    single = take([(0.5, "x")])
    run = replace(RUN, plain=single, drafted=single)
    (row,) = replace(RECORDING, runs=(run,)).figures()
    assert row.tau is None and row.plain_speed == pytest.approx(2)
