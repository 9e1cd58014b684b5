"""Requirements of an adapt run: tokens, disk and time, as plain numbers."""

from pathlib import Path
from typing import Any

import pytest

from vllm_medusa.adapt import plan
from vllm_medusa.adapt.options import AdaptOptions, DrafterOptions
from vllm_medusa.adapt.plan import Work
from vllm_medusa.offline.defaults import Length, TargetSizes

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
    own = disk(136_002, heads=DrafterOptions(lm_heads="own"))[0]
    assert files < 0.3e9 < 3e9 < own < 6e9  # the target's LM head is not copied
    prompts_and_more_layers = disk(136_002, heads=DrafterOptions(kind="eagle3"))[1]
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
    assert slow["compare"] == fast["compare"] == pytest.approx(380)
    assert seconds(1e10, method="medusa-2")["train"] > slow["train"]
    monkeypatch.undo()
    assert all(speed > 1e8 for speed in plan._speeds("float32"))
