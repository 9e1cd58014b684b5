"""Requirements of an adapt run: tokens, disk and time, as plain numbers."""

from pathlib import Path

import pytest

from vllm_medusa.adapt import plan
from vllm_medusa.adapt.options import AdaptOptions, DrafterOptions
from vllm_medusa.adapt.plan import count_tokens, disk_bytes, expected_seconds
from vllm_medusa.offline.defaults import EnginePlan, Length, TargetSizes

TARGET = {"hidden_size": 576, "vocab_size": 49152}


def test_answers_fit_the_targets_context() -> None:
    lengths = [Length(100), Length(900, 2)]
    assert count_tokens(lengths, 2, 512, 1000) == (2000, 2 * (512 + 100))


def test_states_are_cached_for_generated_tokens_up_to_the_limit() -> None:
    def disk(prompt_tokens: int, written: int, **more: object) -> tuple[int, int]:
        files = {"prompts": Path("p.jsonl"), "output": Path("heads")}
        options = AdaptOptions(target="target", **files, dtype="bfloat16", **more)
        return disk_bytes(prompt_tokens, written, options, TARGET, 269_000_000)

    files, states = disk(68_000, 136_000)
    assert states == 136_000 * 576 * 2
    assert files < 6e9
    prompts_and_more_layers = disk(68_000, 136_000, heads=DrafterOptions(kind="eagle3"))[1]
    assert prompts_and_more_layers == 204_000 * 4 * 576 * 2
    assert disk(10**8, 10**9)[1] == 50e9


def test_a_faster_machine_takes_less_but_measures_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = EnginePlan({}, 64), TargetSizes(134_500_000, 269_000_000, 23040, 8192)
    files = {"prompts": Path("p.jsonl"), "output": Path("heads")}

    def seconds(flops: float, **more: object) -> dict[str, float]:
        monkeypatch.setattr(plan, "_speeds", lambda: (flops, 1e10))
        options = AdaptOptions(target="target", **files, **more)
        return expected_seconds(68_000, 136_000, options, TARGET, sizes, engine)

    slow, fast = seconds(1e10), seconds(2e10)
    assert list(slow) == ["distill", "train", "compare"]
    forward = 204_000 * 2 * sizes.values / 1e10  # a multiplication and an addition per weight
    assert slow["distill"] == pytest.approx(75 + forward) and slow["train"] > 2 * forward
    assert slow["train"] == 2 * fast["train"]
    assert slow["distill"] > fast["distill"] > slow["distill"] / 2  # start-up takes constant time
    assert slow["compare"] == fast["compare"] == pytest.approx(380)
    assert seconds(1e10, method="medusa-2")["train"] > slow["train"]
    monkeypatch.undo()
    assert all(speed > 1e8 for speed in plan._speeds())
