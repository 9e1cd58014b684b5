"""Engine settings on a CPU: they fit the available memory, counted from the prompts' tokens."""

import pytest

from vllm_medusa.offline import defaults
from vllm_medusa.offline.comparison import affordable
from vllm_medusa.offline.defaults import COMPILE_FROM, ENGINE_BYTES, TargetSizes, fit, plan_engine

GB = 10**9
# 30 layers of 3 key-value heads of 64 values in bfloat16, as SmolLM2-135M has them
SMOL = TargetSizes(134_500_000, 269_000_000, per_token=2 * 30 * 3 * 64 * 2, positions=8192)
CHATS = [600] * 339 + [1900]  # one long text among short prompts


def test_a_long_prompt_does_not_affect_the_others() -> None:
    fitted = fit(SMOL, CHATS, 64, 20 * GB)
    assert fitted.batch == 64
    assert 1900 < fitted.arguments["max_model_len"] < 2000
    assert 63 * 600 + 1900 < fitted.arguments["kv_cache_memory_bytes"] / SMOL.per_token < 64 * 1100
    assert fitted.memory < 4 * GB


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("available", [5 * GB, 8 * GB, 24 * GB])
def test_never_more_than_is_available(available: int, engines: int) -> None:
    fitted = fit(SMOL, [8192] * 100, 64, available, engines)
    assert fitted.memory <= available
    assert fitted.arguments["kv_cache_memory_bytes"] >= 8192 * SMOL.per_token
    assert fitted.batch <= 64


def test_the_batch_is_reduced_to_fit_the_cache() -> None:
    large = fit(SMOL, [8192] * 100, 64, 24 * GB)
    small = fit(SMOL, [8192] * 100, 64, 4 * GB)
    assert 1 <= small.batch < large.batch <= 64
    assert small.arguments["kv_cache_memory_bytes"] >= small.batch * 8192 * SMOL.per_token


def test_too_little_memory_for_one_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 engines need .* of 8192 tokens .* 3\.0 GB are avail"):
        fit(SMOL, [8192], 64, 3 * GB, engines=2)
    with pytest.raises(ValueError, match=r"an engine needs 2\.\d GB .* 1\.6 GB are available"):
        fit(SMOL, [8192], 64, ENGINE_BYTES)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(defaults, "available_memory", lambda: 24 * GB)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(TargetSizes, "of", lambda *_: SMOL)
    return lambda *args, **more: plan_engine("target", CHATS, 64, *args, **more)


def test_only_long_jobs_are_compiled(plan) -> None:
    assert not plan(tokens=COMPILE_FROM - 1).compiled
    long = plan(tokens=COMPILE_FROM)
    assert long.compiled
    assert 1900 < long.arguments["max_model_len"] < 2000
    assert long.arguments["kv_cache_memory_bytes"] < 2 * GB


@pytest.mark.parametrize(
    ("seconds", "turn", "measured"),
    [
        (1000, 1.0, (32, 3)),  # all of it
        (80, 1.0, (32, 2)),  # fewer rounds
        (40, 1.0, (20, 2)),  # fewer prompts
        (8, 1.0, (8, 1)),  # one round
        (1, 100.0, (6, 1)),  # the minimum
    ],
)
def test_rounds_and_prompts_that_fit_a_time_limit(seconds, turn, measured) -> None:
    assert affordable(seconds, turn, 32, 3) == measured
