"""What an adapt takes: tokens, disk and time, as plain figures."""

from pathlib import Path

import pytest

from vllm_medusa.adapt.amounts import Amounts, Disk, Rates, batch_rows, expected_seconds
from vllm_medusa.adapt.options import AdaptFiles, AdaptOptions, TrainingOptions, training_of
from vllm_medusa.offline.lengths import Length
from vllm_medusa.offline.prompts import Prompt

SIZES = {"hidden_size": 576, "vocab_size": 49152, "weights": 269_000_000, "state_bytes": 2}
CHATS = Amounts(texts=340, prompt_tokens=68_000, written=136_000)


def asked(**more: object) -> AdaptOptions:
    files = AdaptFiles(prompts=Path("prompts.jsonl"), output=Path("heads"))
    return AdaptOptions(target="target", files=files, **more)


def seconds(amounts: Amounts, rates: Rates, **more: object) -> dict[str, float]:
    options = asked(**more)
    return expected_seconds(amounts, rates, options, training_of(options), compiled=True)


def test_answers_are_no_longer_than_the_target_has_room_for() -> None:
    short = Length(Prompt(0, 1, "0", text="a"), 100, 100)
    long = Length(Prompt(1, 2, "1", turns=("a", "b")), 400, 900)
    assert Amounts.of([short, long], 2, 512, 1000) == Amounts(4, 2000, 2 * (512 + 100))


def test_the_states_are_of_written_tokens_and_no_more_than_may_be_kept() -> None:
    options = asked()
    disk = Disk.of(CHATS, options, training_of(options), SIZES)
    assert disk.states == 136_000 * 576 * 2
    assert disk.files < 1e9
    drafter = asked(training=TrainingOptions(drafter="eagle3"))
    whole = Disk.of(CHATS, drafter, training_of(drafter), SIZES)
    assert whole.states == 204_000 * 4 * 576 * 2  # prompts too, and three more layers
    many = Amounts(10**6, 10**8, 10**9)
    assert Disk.of(many, options, training_of(options), SIZES).states == 50e9


def test_a_faster_machine_takes_less_and_measuring_as_long() -> None:
    slow, fast = Rates(1000, 0.14, 64, 200), Rates(2000, 0.07, 64, 400)
    one, other = seconds(CHATS, slow), seconds(CHATS, fast)
    assert list(one) == ["distill", "train", "calibrate", "compare"]
    assert one["train"] == 2 * other["train"] == pytest.approx(204 + 3 * 136_000 / 200)
    assert one["distill"] > other["distill"] > one["distill"] / 2  # starting takes its time
    assert one["compare"] == other["compare"] == pytest.approx(380)


def test_a_large_job_is_calibrated_on_a_part() -> None:
    rates = Rates(1000, 0.14, 64, 200)
    large = Amounts(34_000, 6_800_000, 13_600_000)
    part = (204_000 / 1000 + 136_000 / 200) / 20  # half of a tenth
    assert seconds(CHATS, rates)["calibrate"] == pytest.approx(part)
    assert part < seconds(large, rates)["calibrate"] < 3 * part
    assert "calibrate" not in seconds(CHATS, rates, training=TrainingOptions(drafter="eagle3"))
    joint = seconds(CHATS, rates, training=TrainingOptions(method="medusa-2"))
    assert joint["train"] > seconds(CHATS, rates)["train"]


def test_the_rows_of_a_step_are_those_that_training_will_choose() -> None:
    assert batch_rows(training_of(asked()), CHATS) == 256
    assert batch_rows(training_of(asked()), Amounts(1, 1, 10**8)) == 4096
