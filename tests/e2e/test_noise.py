"""Drafts that share the noise of the target's draws: more are accepted, and no token changes.

Distributions of requests without a seed: `test_unseeded`. On V2 it runs in `test_on_v2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.assets import HEADS, TARGET, code_prompts, trained_model
from support.engines import Completion, complete, engine, greedy, medusa
from support.reference import differing
from support.runner import ON_V2, sized
from support.spies import mean_accepted, recorded_steps
from vllm import LLM

from vllm_medusa.decode import decode
from vllm_medusa.noise import Seeds
from vllm_medusa.sampler import draw_splitmix
from vllm_medusa.tree import TokenTree

pytestmark = pytest.mark.engine

TOKENS = sized(24, 10)
# The fewer nodes, the larger the gain: here 1.5 times as many drafts are accepted.
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
PROMPTS = code_prompts(0, sized(12, 6))
PARAMS = [greedy(TOKENS, temperature=1.0, seed=100 + i) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    with engine(TARGET) as llm:
        return complete(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def without(plain: list[Completion]) -> float:
    with engine(TARGET, medusa(HEADS, TREE.to_lists(), shared_noise=False)) as llm:
        return accepted(llm, plain)


@pytest.fixture(scope="module")
def llm(without: float) -> Iterator[LLM]:
    with engine(TARGET, medusa(HEADS, TREE.to_lists())) as llm:
        yield llm


def accepted(llm: LLM, plain: list[Completion]) -> float:
    """Mean accepted drafts per step; tokens are plain vLLM's."""
    with recorded_steps() as steps:
        got = complete(llm, PROMPTS, PARAMS)
    assert differing(plain, got) == []
    return mean_accepted(steps)


def test_more_drafts_are_accepted(llm: LLM, plain: list[Completion], without: float) -> None:
    assert accepted(llm, plain) > 1.2 * without


@pytest.mark.parametrize("wrong", sized(["position", "request"], ["position", "draft stream"]))
def test_other_noise_loses_the_gain_and_no_token(
    llm: LLM, plain: list[Completion], without: float, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: the next position's noise, another request's, that of V2's own drafts."""
    kind: Any = Seeds
    if ON_V2:
        from vllm_medusa.integration.v2.kernel import HashedNoise as kind
    gumbel = kind.gumbel

    def moved(self: Any, first: int, stop: int, token_ids: Any) -> Any:
        if wrong == "draft stream":
            salt = 1 << 30  # vllm/v1/worker/gpu/sample/gumbel.py
            return gumbel(self, first + salt, stop + salt, token_ids)
        found = gumbel(self, first, stop, token_ids)
        return found.roll(1, 1 if wrong == "position" and found.shape[1] > 1 else 0)

    monkeypatch.setattr(kind, "gumbel", moved)
    assert accepted(llm, plain) < without


def test_noise_drawn_twice_is_detected(
    llm: LLM, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On V1: if drafting advanced a request's generator, later tokens would differ."""

    def advanced(generator: torch.Generator, count: int) -> torch.Tensor:
        return torch.randint(0, 2**31, (count,), generator=generator)

    monkeypatch.setattr("vllm_medusa.integration.v1.runner.next_seeds", advanced)
    some = slice(4)
    assert differing(plain[some], complete(llm, PROMPTS[some], PARAMS[some])) == [0, 1, 2, 3]


def test_requests_without_a_seed_draw_independently(llm: LLM) -> None:
    free = [greedy(TOKENS, temperature=1.0)] * 6
    first, second = (complete(llm, [PROMPTS[0]] * 6, free) for _ in range(2))
    assert len({completion.token_ids for completion in (*first, *second)}) == 12


def test_accepts_what_the_oracle_accepts(llm: LLM) -> None:
    model, heads = trained_model()
    for prompt, params in list(zip(PROMPTS, PARAMS, strict=True))[:4]:
        expected = decode(
            model, heads, TREE, torch.tensor(prompt), TOKENS, temperature=1.0,
            generator=torch.Generator().manual_seed(params.seed), draw=draw_splitmix,
        )  # fmt: skip
        (got,) = complete(llm, [prompt], params)
        assert list(got.token_ids) == expected.token_ids
        assert list(got.accepted) == expected.accepted_per_step
