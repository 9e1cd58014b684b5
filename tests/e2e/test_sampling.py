"""At temperature > 0 with equal seeds: plain vLLM's tokens for all sampling parameters.

Planted drafts make nearly every step accept several tokens, so a generator that advances once too
often, a penalty that misses an accepted token, or a stop token masked one level too long shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import engine, medusa, random_prompts, stop
from support.models import VOCAB
from support.outcomes import (
    Outcome,
    assert_same,
    assert_same_with_trees,
    outcomes,
    seeded,
    steady_outcomes,
)
from support.runner import sized
from support.spies import mean_accepted
from support.spies import mixed as both_in_one
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine

TREE: Any = sized({"dense": [3, 2, 2]}, [[0], [1], [0, 0], [1, 0], [1, 0, 0]])
PROMPTS = random_prompts(sized(8, 2), VOCAB, longest=sized(100, 12), seed=21)
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
OFTEN = list(range(5, VOCAB, sized(4, 5)))  # one token in five is a stop token; V2 allows 128
CASES: dict[str, dict[str, Any]] = {
    "t1": {"temperature": 1.0},
    "top_p_and_top_k": {"temperature": 1.0, "top_p": 0.7, "top_k": 30},
    "greedy_penalized": {"temperature": 0.0} | PENALTIES,
    "all_penalties": {"temperature": 1.0, "top_k": 50, "top_p": 0.9} | PENALTIES,
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(40, 90))},
    "greedy_allowed": {"temperature": 0.0, "allowed_token_ids": list(range(40, 90))},
    "min_tokens": {"temperature": 0.7, "min_tokens": sized(17, 7), "stop_token_ids": OFTEN},
    "greedy_min_tokens": {"temperature": 0.0, "min_tokens": 17, "stop_token_ids": OFTEN},
    "min_tokens_eos": {"temperature": 1.0, "min_tokens": sized(30, 7), "ignore_eos": False},
    "greedy_logprobs": {"temperature": 0.0, "logprobs": 3},
    "logprobs_penalized": {"temperature": 1.0, "logprobs": 0} | PENALTIES,
    "prompt_logprobs": {"temperature": 0.7, "prompt_logprobs": 3, "logprobs": 2},
    "n3": {"temperature": 1.0, "n": 3, "logprobs": 2},
}
KINDS = sized(list(CASES), ["top_p_and_top_k", "greedy_penalized", "all_penalties", "allowed",
    "min_tokens", "logprobs_penalized", "prompt_logprobs", "n3"])  # fmt: skip


def requests(name: str) -> list[SamplingParams]:
    return seeded(len(PROMPTS), 1000 * list(CASES).index(name), **CASES[name])


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Two requests of every kind in one batch; one on V2."""
    pairs = [(prompt, param) for name in KINDS for prompt, param in
             list(zip(PROMPTS, requests(name), strict=True))[: sized(2, 1)]]  # fmt: skip
    return [prompt for prompt, _ in pairs], [param for _, param in pairs]


def bad_words(free: list[Outcome]) -> list[SamplingParams]:
    """The requests of ``free`` again, with two or three of their tokens as a bad word."""
    params = requests("t1")
    for param, outcome in zip(params, free, strict=True):
        tokens = list(outcome.tokens)
        param._bad_words_token_ids = [tokens[i : i + 2 + i % 2] for i in range(4, 12, 3)]
    return params


@pytest.fixture(scope="module")
def plain(chaotic_llama: str) -> dict[str, list[Outcome]]:
    with engine(chaotic_llama) as llm:
        alone = sized(list(CASES), ["t1"])
        results = {name: steady_outcomes(llm, PROMPTS, requests(name)) for name in alone}
        results["mixed"] = steady_outcomes(llm, *mixed())
        results["bad_words"] = steady_outcomes(llm, PROMPTS, bad_words(results["t1"]))
    return results


@pytest.fixture(scope="module")
def llm(plain: object, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    with engine(chaotic_llama, medusa(random_heads, TREE)) as llm:
        yield llm


def test_the_cases_have_an_effect(plain: dict[str, list[Outcome]]) -> None:
    tokens = {name: [o.tokens for o in results] for name, results in plain.items()}
    for name in ("greedy_penalized", "greedy_allowed", "greedy_min_tokens"):
        assert tokens[name] != tokens["greedy_logprobs"]
    assert {t for output in tokens["allowed"] for t in output} <= set(range(40, 90))
    for name in ("min_tokens", "greedy_min_tokens"):
        lengths = [len(output) for output in tokens[name]]
        assert min(lengths) >= 17 and len(set(lengths)) > 2 and min(lengths) < 20
        assert any(o.completion.stop_reason in OFTEN for o in plain[name])
    assert any(o.completion.finish_reason == "stop" for o in plain["min_tokens_eos"])
    assert len(set(tokens["n3"])) == 3 * len(PROMPTS)
    every = [outcome for results in plain.values() for outcome in results]
    assert sum(not outcome.steady for outcome in every) <= 0.06 * len(every)


@pytest.mark.parametrize("name", CASES)
def test_seeded(llm: LLM, plain: dict[str, list[Outcome]], name: str) -> None:
    steps = assert_same_with_trees(llm, plain[name], PROMPTS, requests(name))
    assert mean_accepted(steps) > 1.2


def test_all_kinds_in_one_batch(llm: LLM, plain: dict[str, list[Outcome]]) -> None:
    steps = assert_same_with_trees(llm, plain["mixed"], *mixed())
    assert mean_accepted(steps) > sized(1.2, 0.9)
    assert max(map(len, steps)) == min(32, len(plain["mixed"]))


def test_bad_words(llm: LLM, plain: dict[str, list[Outcome]]) -> None:
    """Bad words of several tokens, the first of which are drafts."""
    assert all(a.tokens != b.tokens for a, b in zip(plain["t1"], plain["bad_words"], strict=True))
    given = PROMPTS, bad_words(plain["t1"])
    steps = assert_same_with_trees(llm, plain["bad_words"], *given, miss=0.0)
    assert mean_accepted(steps) > 1.2


def test_batch_invariance_of_a_seed(llm: LLM, plain: dict[str, list[Outcome]]) -> None:
    """Neither the drafts of a step nor the other requests in it affect a request's randomness."""
    alone = [outcomes(llm, [p], [s])[0] for p, s in zip(PROMPTS, requests("t1"), strict=True)]
    assert_same(plain["t1"], alone)


def test_unplanted_heads_change_nothing(llm: LLM, plain: dict[str, list[Outcome]]) -> None:
    assert_same(plain["mixed"], outcomes(llm, *mixed()))


def test_seeds_survive_chunked_prefill(
    llm: LLM, plain: dict[str, list[Outcome]], chaotic_llama: str, random_heads: str
) -> None:
    """Plain vLLM crashes here ("CPU Generator does not use offset"); we match its unchunked run."""
    stop(llm)
    changes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_chunked_prefill": True}
    with engine(chaotic_llama, medusa(random_heads, TREE), **changes) as chunked:
        steps = assert_same_with_trees(chunked, plain["mixed"], *mixed())
    assert sum(row.is_partial_prefill for step in steps for row in step) > 20
    assert len(both_in_one(steps)) > 20
