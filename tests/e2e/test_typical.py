"""Typical acceptance in the engine: equal to the oracle with the same random numbers.

Typical acceptance accepts plausible tokens, so its tokens differ from plain vLLM's; decode.py, with
vLLM's sampling method, computes the expected ones, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.assets import HEADS, TARGET, VOCAB, code_prompts, trained_model
from support.engines import engine, medusa
from support.outcomes import Outcome, assert_same, outcomes, seeded, steady_outcomes
from support.runner import ON_V2, sized
from support.spies import Step, accepted_per_step, mean_accepted, recorded_steps
from vllm import LLM, SamplingParams

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.integration.drafters.medusa_drafter import MedusaDrafter
from vllm_medusa.sampler import Draw, draw_splitmix
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.draft_trees import DraftTrees

pytestmark = pytest.mark.engine

TREE = sized(
    TokenTree.dense([3, 2, 1, 1]), TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
)
TOKENS = sized(40, 14)
COUNT = sized(6, 3)
TYPICAL = {"medusa": {"acceptance": "typical"}}
LOSSLESS = {"medusa": {"acceptance": "lossless"}}
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return code_prompts(0, COUNT)


@pytest.fixture(scope="module")
def plain(prompts: Prompts) -> dict[str, list[Outcome]]:
    if ON_V2:  # only `test_equals_the_oracle` runs there
        return {}
    with engine(TARGET) as llm:
        return {
            "sampled": steady_outcomes(llm, prompts, seeded(COUNT, 0, temperature=0.8, logprobs=2)),
            "greedy": steady_outcomes(llm, prompts, seeded(COUNT, 0, temperature=0.0, logprobs=2)),
        }


@pytest.fixture(scope="module")
def llm(plain: object) -> Iterator[LLM]:
    """Typical for every request without an option of its own."""
    options = {"mode": "typical", "epsilon": 0.2, "delta": 0.4}
    with engine(TARGET, medusa(HEADS, TREE.to_lists(), acceptance=options)) as llm:
        yield llm


def run(
    llm: LLM, prompts: Prompts, params: list[SamplingParams]
) -> tuple[list[Outcome], list[Step]]:
    with recorded_steps() as steps:
        got = outcomes(llm, prompts, params)
    return got, steps


RULES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # options of the oracle and of the request; None: the engine's default
    "engine_wide": ({"epsilon": 0.2, "delta": 0.4}, None),
    "overridden": ({"epsilon": 0.02, "delta": 0.4}, {"epsilon": 0.02}),
    "greedy_root": ({"epsilon": 0.2, "delta": 0.4, "greedy_root": True}, {"greedy_root": True}),
}
SAMPLING: dict[str, dict[str, Any]] = {
    "t0.8": {"temperature": 0.8},
    "t1_top_p": {"temperature": 1.0, "top_p": 0.9},
    "t0.7_top_k": {"temperature": 0.7, "top_k": 20},
}


@pytest.fixture(scope="module")
def oracle(prompts: Prompts) -> Any:
    model, heads = trained_model()

    def decoded(
        rule: dict[str, Any], seeds: list[int], given: Prompts = prompts, **sampling: Any
    ) -> list[DecodeResult]:
        return [
            decode(
                model, heads, TREE, torch.tensor(prompt), TOKENS,
                draw=first_draw_of_v2(prompt, seed) if ON_V2 else draw_splitmix,
                acceptance=AcceptanceConfig(mode="typical", **rule),
                generator=torch.Generator().manual_seed(seed), **sampling,
            )
            for prompt, seed in zip(given, seeds, strict=True)
        ]  # fmt: skip

    return decoded


def first_draw_of_v2(prompt: list[int], seed: int) -> Draw:
    """The sample after the prompt, as in V2; with greedy_root there is no other."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    def draw(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        one = torch.zeros(1, dtype=torch.int64)
        return gumbel_sample(
            logits[None], one, torch.ones(1), one + seed, one + len(prompt) - 1,
            apply_temperature=False, is_drafting=False,
        )  # fmt: skip

    return draw


def assert_expected(
    steps: list[Step], prompts: Prompts, got: list[Outcome], expected: list[DecodeResult]
) -> None:
    for prompt, outcome, result in zip(prompts, got, expected, strict=True):
        assert list(outcome.tokens) == result.token_ids
        assert accepted_per_step(steps, prompt) == result.accepted_per_step
        assert list(outcome.completion.accepted) == result.accepted_per_step


# every rule and every kind of sampling; all nine pairs are in the batch of the next test
@pytest.mark.parametrize(
    ("rule", "sampling"),
    sized(list(zip(RULES, SAMPLING, strict=True)), [("greedy_root", "t1_top_p")]),
)
def test_equals_the_oracle(
    llm: LLM, oracle: Any, prompts: Prompts, rule: str, sampling: str
) -> None:
    oracle_rule, requested = RULES[rule]
    extra = {} if requested is None else {"extra_args": {"medusa": requested}}
    params = seeded(COUNT, 70, **SAMPLING[sampling], **extra)
    expected = oracle(oracle_rule, [param.seed for param in params], **SAMPLING[sampling])
    got, steps = run(llm, prompts, params)
    assert_expected(steps, prompts, got, expected)
    assert mean_accepted(steps) > 0.3


def test_all_rules_and_parameters_in_one_batch(llm: LLM, oracle: Any, prompts: Prompts) -> None:
    """Every request keeps its own rule; lossless and greedy requests are between them."""
    kinds = [(rule, sampling) for sampling in SAMPLING for rule in RULES]
    batch, params, expected = [], [], []
    for number, (rule, sampling) in enumerate(kinds):
        oracle_rule, requested = RULES[rule]
        prompt = [*prompts[number % 6], 100 + number]  # all prompts are distinct
        extra = {} if requested is None else {"extra_args": {"medusa": requested}}
        (other,) = seeded(1, 1, temperature=0.9 * (number % 2), extra_args=LOSSLESS)
        params += [*seeded(1, number, **SAMPLING[sampling], **extra), other]
        batch += [prompt, prompts[number % 6]]
        expected += oracle(oracle_rule, [number], [prompt], **SAMPLING[sampling])
    got, steps = run(llm, batch, params)
    assert_expected(steps, batch[::2], got[::2], expected)


def test_accepts_more_than_lossless(llm: LLM, prompts: Prompts) -> None:
    _, few = run(llm, prompts * 2, seeded(12, 500, temperature=0.8, extra_args=LOSSLESS))
    _, many = run(llm, prompts * 2, seeded(12, 500, temperature=0.8))
    assert mean_accepted(many) > 1.15 * mean_accepted(few) > 0


def test_lossless_and_typical_together(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: Prompts
) -> None:
    """The lossless requests of a mixed batch have plain vLLM's tokens and logprobs."""
    params = seeded(COUNT, 0, temperature=0.8, logprobs=2, extra_args=LOSSLESS)
    others = seeded(COUNT, 900, temperature=0.8, logprobs=3, repetition_penalty=1.1)
    pairs = [pair for both in zip(params, others, strict=True) for pair in both]
    with recorded_steps() as steps:
        got = outcomes(llm, [p for prompt in prompts for p in (prompt, prompt)], pairs)
    assert_same(plain["sampled"], got[::2])
    alone, _ = run(llm, prompts, others)
    assert_same(alone, got[1::2])
    assert mean_accepted(steps) > 0.2


def test_temperature_0_is_greedy(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: Prompts
) -> None:
    for extra in (TYPICAL, {"medusa": {"greedy_root": True}}, None):
        params = seeded(COUNT, 0, temperature=0.0, logprobs=2, extra_args=extra)
        assert_same(plain["greedy"], outcomes(llm, prompts, params))


ALLOWED = list(range(60, VOCAB))
WITH: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 15, "stop_token_ids": list(range(200, 1200))},
    "allowed": {"allowed_token_ids": ALLOWED},
    "many": {"top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 9,
             "stop_token_ids": [200, 201], "allowed_token_ids": ALLOWED},
}  # fmt: skip


def assert_logprobs_belong(results: list[Outcome]) -> None:
    """Each token has its logprob; the list contains the most probable ones, starting at rank 1."""
    for result in results:
        assert result.logprobs is not None and len(result.logprobs) == len(result.tokens)
        for token, entries in zip(result.tokens, result.logprobs, strict=True):
            rank, logprob = entries[token]
            better = [p for r, p in entries.values() if r < rank]
            assert all(p >= logprob for p in better)
            assert min(r for r, _ in entries.values()) == 1
            assert logprob > -torch.inf


def assert_exact(result: Outcome, logits: torch.Tensor, named: Sequence[int] = ()) -> None:
    """Each token, and the ``named`` ones, have the logprob computed from the target's logits."""
    exact = logits.log_softmax(-1)
    assert result.logprobs is not None
    for place, token in enumerate(result.tokens):
        for wanted in (token, *named):
            found = result.logprobs[place][wanted][1]
            assert abs(found - float(exact[place, wanted])) < 1e-3


def teacher_forced(prompts: Prompts, results: list[Outcome]) -> list[torch.Tensor]:
    """The target's own logits [tokens, V] along each output, from transformers."""
    model, rows = trained_model()[0], []
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([[*prompt, *result.tokens]])
        with torch.inference_mode():
            rows.append(model(ids).logits[0, len(prompt) - 1 : -1])
    return rows


@pytest.mark.parametrize("name", WITH)
def test_with_other_parameters(llm: LLM, prompts: Prompts, name: str) -> None:
    """Nothing crashes, rules hold, and raw logprobs are the target's at the token's position."""
    params = seeded(COUNT, 300, temperature=0.8, logprobs=3, **WITH[name])
    got, steps = run(llm, prompts, params)
    assert mean_accepted(steps) > 0.05
    assert_logprobs_belong(got)
    for result, logits in zip(got, teacher_forced(prompts, got), strict=True):
        assert_exact(result, logits)
    if "allowed_token_ids" in WITH[name]:
        assert {token for result in got for token in result.tokens} <= set(ALLOWED)
    if minimum := WITH[name].get("min_tokens"):
        stops = set(WITH[name]["stop_token_ids"])
        assert all(stops.isdisjoint(result.tokens[: minimum - 1]) for result in got)


def test_logprobs_of_named_tokens(llm: LLM, prompts: Prompts) -> None:
    """`logprob_token_ids` with typical acceptance, in requests with some, fewer or no ids."""
    params = seeded(COUNT, 300, temperature=0.8)
    named: list[list[int] | None] = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7], None, None]
    for param, ids in zip(params, named, strict=True):
        param.logprob_token_ids = ids
    params[1].extra_args = LOSSLESS
    got, steps = run(llm, prompts, params)
    assert mean_accepted(steps) > 0.05
    for result, ids, logits in zip(got, named, teacher_forced(prompts, got), strict=True):
        if ids:
            assert_exact(result, logits, ids)


def test_penalties_count_the_path(
    llm: LLM, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft repeats its parent's token, which a prohibitive penalty allows only once."""
    draft = MedusaDrafter.draft

    def stuttering(self: Any, *args: Any) -> DraftTrees:
        drafts = draft(self, *args)
        tokens = drafts.token_ids.clone()
        for node in range(1, TREE.num_nodes):
            if (parent := TREE.parents[node]) > 0:
                tokens[:, node] = tokens[:, parent]
        return replace(drafts, token_ids=tokens)

    monkeypatch.setattr(MedusaDrafter, "draft", stuttering)
    accepting = {"medusa": {"epsilon": 1e-9, "delta": 1e-9}}
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 10, "extra_args": accepting}
    every = prompts * 4
    free, _ = run(llm, every, seeded(len(every), 40, **options))
    got, steps = run(llm, every, seeded(len(every), 40, repetition_penalty=1000.0, **options))
    assert any(a == b for o in free for a, b in pairwise(o.tokens))  # repeats without penalty
    assert mean_accepted(steps) > 0
    assert [o.tokens for o in got if len(set(o.tokens)) < TOKENS] == []


def test_processed_logprobs(plain: object, prompts: Prompts) -> None:
    """They describe the sampled distribution, with temperature and top-k applied."""
    changes = {"logprobs_mode": "processed_logprobs"}
    config = medusa(HEADS, TREE.to_lists(), acceptance="typical")
    with engine(TARGET, config, **changes) as llm:
        got, steps = run(llm, prompts, seeded(COUNT, 300, temperature=0.7, top_k=8, logprobs=2))
    assert mean_accepted(steps) > 0.3
    assert_logprobs_belong(got)
    for result, logits in zip(got, teacher_forced(prompts, got), strict=True):
        scaled = logits / 0.7
        floor = scaled.topk(8).values[:, -1:]
        assert_exact(result, scaled.masked_fill(scaled < floor, -torch.inf))
