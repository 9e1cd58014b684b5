"""Batches of requests, in this process or in the engine's own."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine

from vllm_medusa.offline import process
from vllm_medusa.offline.batch import AcceptanceCounts, Result, run_batch
from vllm_medusa.offline.engine import EngineRefused, Sampling
from vllm_medusa.offline.process import EngineProcess, serve
from vllm_medusa.offline.prompts import Prompt

PROMPTS = [Prompt(i, i + 1, f"r{i}", text=f"prompt {i}") for i in range(20)]


def by_index(results: list[Result]) -> dict[int, list[int]]:
    return {r.prompt.index: r.answers[-1].token_ids for r in results}


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_every_prompt_runs_once_within_the_batch_size(concurrency):
    engine = FakeEngine()
    results = list(run_batch(PROMPTS, engine, concurrency=concurrency, seed=4))
    assert sorted(r.prompt.index for r in results) == list(range(20))
    assert engine.most_active == min(concurrency, 20)
    alone = list(run_batch(PROMPTS, FakeEngine(), concurrency=1, seed=4))
    assert by_index(results) == by_index(alone)


def test_seeds_depend_on_the_prompt_not_on_the_order():
    whole = by_index(list(run_batch(PROMPTS, FakeEngine(), concurrency=4, seed=9)))
    rest = by_index(list(run_batch(PROMPTS[7:], FakeEngine(), concurrency=4, seed=9)))
    assert rest == {i: whole[i] for i in range(7, 20)}
    engine = FakeEngine()
    list(run_batch(PROMPTS[7:], engine, concurrency=4, seed=9))
    assert engine.seeds == {f"{i}.0": 9 + i for i in range(7, 20)}
    other = by_index(list(run_batch(PROMPTS, FakeEngine(), concurrency=4, seed=10)))
    assert other != whole


def test_prompts_are_read_lazily():
    taken = []

    def source():
        for prompt in PROMPTS:
            taken.append(prompt.index)
            yield prompt

    results = run_batch(source(), FakeEngine(max_tokens=1), concurrency=2)
    next(results)
    assert len(taken) <= 2


def test_acceptance_is_computed_from_the_steps():
    engine = FakeEngine(max_tokens=1, step_sizes=(3,))
    engine.submit = lambda key, prompt, seed, options: (
        engine.active.update({key: list(range(8))}),
        engine.done.update({key: 0}),
        engine.steps.update({key: 0}),
    )[-1]
    (result,) = run_batch(PROMPTS[:1], engine, concurrency=1)
    assert result.answers[0].delivered == [1, 3, 3, 1]
    record = json.loads(json.dumps(result.to_dict()))
    assert record["acceptance"] == {
        "steps": 3,
        "accepted_draft_tokens": 4,
        "tokens_per_step": pytest.approx(7 / 3),
        "histogram": [1, 0, 2],
    }
    assert record["token_ids"] == list(range(8))
    assert (record["index"], record["request_id"], record["finish_reason"]) == (0, "r0", "length")
    assert "turns" not in record


def test_without_a_chat_template_turns_are_concatenated():
    engine = FakeEngine()
    prompt = Prompt(0, 1, "c", turns=("Say. ", " More. ", " Again."))
    (result,) = run_batch([prompt], engine, concurrency=4, seed=1)
    one, two, _three = (a.text for a in result.answers)
    assert [bytes(prompt).decode() for prompt in engine.prompts.values()] == [
        "Say. ", f"Say. {one} More. ", f"Say. {one} More. {two} Again.",
    ]  # fmt: skip
    record = result.to_dict()
    assert [turn["text"] for turn in record["turns"]] == [a.text for a in result.answers]
    assert record["text"] == result.answers[-1].text


def test_with_a_chat_template_the_conversation_is_rendered():
    engine = FakeEngine(chat=True)
    system = {"role": "system", "content": "S"}
    prompt = Prompt(0, 1, "c", history=(system,), turns=("A", "B"))
    (result,) = run_batch([prompt], engine, concurrency=1)
    answer = result.answers[0].text
    last = engine.prompts["0.1"]
    assert isinstance(last, list)
    assert bytes(last).decode() == f"[system]S[user]A[assistant]{answer}[user]B"


def test_a_refused_turn_keeps_earlier_answers():
    engine = FakeEngine(longest_prompt=60)
    prompt = Prompt(0, 1, "c", turns=("Say.", "x" * 80))
    (result,) = run_batch([prompt], engine, concurrency=1)
    record = result.to_dict()
    assert record["error"].startswith("the prompt has")
    (turn,) = record["turns"]
    assert turn["token_ids"] and turn["acceptance"]["steps"] > 0


@given(st.lists(st.lists(st.integers(1, 6), min_size=1)))
def test_every_token_is_counted_once(requests):
    """The prefill step is not a verification."""
    parts = [AcceptanceCounts.of(delivered) for delivered in requests]
    total = AcceptanceCounts.summed(parts)
    assert total.steps == sum(len(delivered) - 1 for delivered in requests)
    first = sum(delivered[0] for delivered in requests)
    assert first + total.accepted + total.steps == sum(map(sum, requests))
    assert AcceptanceCounts.of([1]).tau is None
    with pytest.raises(ValueError, match="every step must deliver"):
        AcceptanceCounts.of([1, 0])


class Engine(FakeEngine):
    def __init__(self, settings: dict[str, Any], sampling: Sampling, *, seeded: bool):
        if settings["model"] == "none":
            raise EngineRefused(f"no model; seeded: {seeded}")
        super().__init__()
        config = type("Config", (), {"dtype": "torch.float32"})
        self.llm: Any = type("LLM", (), {"llm_engine": type("Core", (), {"model_config": config})})

    def close(self) -> None: ...


def body(channel: Any) -> None:
    """Run in the child: the real loop with the fake engine."""
    process.VllmEngine = Engine  # type: ignore[misc, assignment]
    serve(channel)


def test_results_are_returned_one_by_one_or_with_their_seconds(monkeypatch):
    monkeypatch.setattr(process, "serve", body)
    expected = list(run_batch(PROMPTS[:5], FakeEngine(), concurrency=2, seed=3))
    with EngineProcess({"model": "m"}, Sampling()) as started:
        assert started.dtype == "float32"
        assert list(started.stream(PROMPTS[:5], 2, 3)) == expected
    with EngineProcess({"model": "m"}, Sampling()) as started:
        results, seconds = started.run(PROMPTS[:5], 2, 3)
        assert results == expected and seconds > 0


@pytest.mark.parametrize(("temperature", "seeded"), [(0, True), (1, True), (1, False)])
def test_only_seeded_sampling_is_announced_and_a_refusal_is_reported(
    monkeypatch, temperature, seeded
):
    monkeypatch.setattr(process, "serve", body)
    announced = temperature > 0 and seeded
    with pytest.raises(EngineRefused, match=f"no model; seeded: {announced}"):
        EngineProcess({"model": "none"}, Sampling(temperature=temperature), seeded=seeded)
