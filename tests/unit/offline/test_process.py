"""The engine's process, with an engine that needs no model."""

from typing import Any

import pytest
from support.fake_engine import FakeEngine

from vllm_medusa.offline import engine, process
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.engine import EngineRefused, EngineSettings, Sampling
from vllm_medusa.offline.process import EngineProcess, serve
from vllm_medusa.offline.prompts import Prompt

PROMPTS = [Prompt(i, i + 1, f"r{i}", text=f"prompt {i}") for i in range(5)]


class Engine(FakeEngine):
    def __init__(self, settings: EngineSettings, sampling: Sampling, *, seeded: bool):
        if settings.model == "none":
            raise EngineRefused(f"no model; seeded: {seeded}")
        super().__init__()
        config = type("Config", (), {"dtype": "torch.float32"})
        self.llm: Any = type("LLM", (), {"llm_engine": type("Core", (), {"model_config": config})})

    def close(self) -> None: ...


def body(channel: Any) -> None:
    """Run in the child: the real loop with the fake engine."""
    engine.VllmEngine = Engine  # type: ignore[misc, assignment]
    serve(channel)


def test_results_are_returned_one_by_one_or_with_their_seconds(monkeypatch):
    monkeypatch.setattr(process, "serve", body)
    expected = list(run_batch(PROMPTS, FakeEngine(), concurrency=2, seed=3))
    with EngineProcess(EngineSettings("m"), Sampling()) as started:
        assert started.dtype == "float32"
        assert list(started.stream(PROMPTS, 2, 3)) == expected
    with EngineProcess(EngineSettings("m"), Sampling()) as started:
        results, seconds = started.run(PROMPTS, 2, 3)
        assert results == expected and seconds > 0


@pytest.mark.parametrize(("heat", "seeded", "said"), [(0, True, 0), (1, True, 1), (1, False, 0)])
def test_a_refusal_is_reported_and_only_seeded_sampling_is_announced(
    monkeypatch, heat, seeded, said
):
    monkeypatch.setattr(process, "serve", body)
    with pytest.raises(EngineRefused, match=f"no model; seeded: {bool(said)}"):
        EngineProcess(EngineSettings("none"), Sampling(temperature=heat), seeded=seeded)
