"""Hydra heads in a real engine: plain vLLM's tokens, accepted step by step as in decode.py.

The heads memorized a chaotic target's outputs, only along the true path: a head that
reads another branch, or none, is always wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import complete, engine, greedy, medusa
from support.hydra_case import KNOWN, TOKENS, TREES, Fitted
from support.models import VOCAB
from support.reference import differing
from support.runner import ON_V2, on_v1
from support.spies import assert_told, mean_accepted, recorded_steps
from vllm import LLM, SamplingParams

from vllm_medusa.proposer.steps import HydraStep
from vllm_medusa.worker.drafting import MedusaDrafter

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=TREES)
def running(request: pytest.FixtureRequest, hydra_case: Fitted) -> Iterator[tuple[str, LLM]]:
    kind = request.param
    with engine(hydra_case.model, medusa(hydra_case.heads[kind], **TREES[kind][0])) as llm:
        yield kind, llm


def test_accepts_what_the_oracle_accepts(running: tuple[str, LLM], hydra_case: Fitted) -> None:
    kind, llm = running
    with recorded_steps() as steps:
        got = complete(llm, hydra_case.prompts, greedy(TOKENS))
    assert_told(steps, hydra_case.prompts, got)
    for completion, result in zip(got, hydra_case.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert list(completion.accepted) == result.accepted_per_step
    assert mean_accepted(steps) > 0.8


@pytest.mark.skipif(ON_V2, reason="too few prompts for a mean")
def test_another_map_costs_acceptance(
    running: tuple[str, LLM], hydra_case: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: the rows belong to other tokens than those in the map."""
    kind, llm = running
    choose, widths = MedusaDrafter._read, []

    def wrong(self: MedusaDrafter, logits: Any, *args: Any) -> Any:
        widths.append(logits.shape[-1])
        return choose(self, logits.roll(1, -1), *args)

    monkeypatch.setattr(MedusaDrafter, "_read", wrong)
    with recorded_steps() as steps:
        got = complete(llm, hydra_case.prompts, greedy(TOKENS))
    assert set(widths) == {KNOWN if kind == "dynamic" else VOCAB}
    for completion, result in zip(got, hydra_case.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
    assert mean_accepted(steps) < 0.2


@pytest.mark.skipif(ON_V2, reason="too few prompts for a mean")
def test_a_siblings_token_costs_acceptance(
    running: tuple[str, LLM], hydra_case: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: each node's head reads its sibling's token."""
    kind, llm = running
    expand = HydraStep.expand

    def wrong(self: HydraStep, level: int, tokens: Any, *args: Any) -> Any:
        return expand(self, level, tokens if level == 0 else tokens.roll(1, 1), *args)

    monkeypatch.setattr(HydraStep, "expand", wrong)
    with recorded_steps() as steps:
        got = complete(llm, hydra_case.prompts, greedy(TOKENS))
    for completion, result in zip(got, hydra_case.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
    right = [n for result in hydra_case.expected[kind] for n in result.accepted_per_step]
    assert mean_accepted(steps) < 0.93 * sum(right) / len(right)


@pytest.mark.skipif(ON_V2, reason="plain V2 is compared in tests/v2")
def test_seeded_samples_are_plain_vllms(running: tuple[str, LLM], hydra_case: Fitted) -> None:
    params = [
        SamplingParams(temperature=0.4, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        for seed in range(len(hydra_case.prompts))
    ]
    got = complete(running[1], hydra_case.prompts, params)
    plain = _plain(hydra_case, params)
    assert differing(plain, got) == []


_seen: list[Any] = []


def _plain(hydra_case: Fitted, params: list[SamplingParams]) -> list[Any]:
    if not _seen:
        with on_v1(), engine(hydra_case.model) as llm:
            _seen.extend(complete(llm, hydra_case.prompts, params))
    return _seen
