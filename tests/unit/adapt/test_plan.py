"""Requirements of an adapt run: tokens, disk and time, as plain numbers."""

from pathlib import Path

import pytest

from vllm_medusa.adapt import plan
from vllm_medusa.adapt.options import AdaptOptions, training_of
from vllm_medusa.adapt.plan import Amounts, disk_bytes, expected_seconds
from vllm_medusa.offline.defaults import EnginePlan, Length, TargetSizes

TARGET = {"hidden_size": 576, "vocab_size": 49152}
SIZES = TargetSizes(134_500_000, 269_000_000, 23040, 8192)
CHATS = Amounts(texts=340, prompt_tokens=68_000, written=136_000)


def chosen(**more: object) -> AdaptOptions:
    return AdaptOptions(target="target", prompts=Path("p.jsonl"), output=Path("heads"), **more)


def test_answers_fit_the_targets_context() -> None:
    lengths = [Length(100), Length(900, 2)]
    assert Amounts.of(lengths, 2, 512, 1000) == Amounts(4, 2000, 2 * (512 + 100))


def test_states_are_cached_for_generated_tokens_up_to_the_limit() -> None:
    def disk(amounts: Amounts, **more: object) -> tuple[int, int]:
        return disk_bytes(amounts, training_of(chosen(dtype="bfloat16", **more)), TARGET, SIZES)

    files, states = disk(CHATS)
    assert states == 136_000 * 576 * 2
    assert files < 6e9
    assert disk(CHATS, drafter="eagle3")[1] == 204_000 * 4 * 576 * 2  # prompts and more layers
    assert disk(Amounts(10**6, 10**8, 10**9))[1] == 50e9


def test_a_faster_machine_takes_less_but_measures_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EnginePlan({}, 64)

    def seconds(flops: float, **more: object) -> dict[str, float]:
        monkeypatch.setattr(plan, "_speeds", lambda: (flops, 1e10))
        options = chosen(**more)
        return expected_seconds(CHATS, options, training_of(options), TARGET, SIZES, engine)

    slow, fast = seconds(1e10), seconds(2e10)
    assert list(slow) == ["distill", "train", "compare"]
    forward = 204_000 * 2 * SIZES.values / 1e10  # a multiplication and an addition per weight
    assert slow["distill"] == pytest.approx(75 + forward) and slow["train"] > 2 * forward
    assert slow["train"] == 2 * fast["train"]
    assert slow["distill"] > fast["distill"] > slow["distill"] / 2  # start-up takes constant time
    assert slow["compare"] == fast["compare"] == pytest.approx(380)
    assert seconds(1e10, method="medusa-2")["train"] > slow["train"]
    monkeypatch.undo()
    assert all(speed > 1e8 for speed in plan._speeds())
