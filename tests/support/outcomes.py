"""Requests with their own sampling parameters, and everything about their outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams

from support.engines import Completion, Prompt, completion_of

Logprobs = list[dict[int, tuple[int, float]]]  # per token: id -> (rank, logprob)


@dataclass(frozen=True)
class Outcome:
    """One output of a request; a request with ``n=3`` has three."""

    seed: int | None  # what this output was drawn with: vLLM adds the output's number
    completion: Completion
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.token_ids


def outcomes(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> list[Outcome]:
    """Run all requests at once."""
    results = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], list(params), use_tqdm=False
    )
    return [
        Outcome(
            seed=None if param.seed is None else param.seed + number,
            completion=completion_of(output),
            logprobs=_plain(output.logprobs),
            prompt_logprobs=_plain(result.prompt_logprobs),
        )
        for result, param in zip(results, params, strict=True)
        for number, output in enumerate(result.outputs)
    ]


def seeded(count: int, first_seed: int, **options: Any) -> list[SamplingParams]:
    """Parameters that differ in their seed only."""
    defaults = {"max_tokens": 40, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(seed=first_seed + 10 * i, **defaults | options) for i in range(count)]


def assert_same(expected: Sequence[Outcome], got: Sequence[Outcome]) -> None:
    """Tokens, lengths, reasons, logprobs (to 1e-4), the lists of likeliest tokens."""
    assert [o.completion for o in expected] == [o.completion for o in got]
    for one, other in zip(expected, got, strict=True):
        assert_close(one.logprobs, other.logprobs)
        assert_close(one.prompt_logprobs, other.prompt_logprobs)


def assert_close(expected: Logprobs | None, got: Logprobs | None, tolerance: float = 1e-4) -> None:
    """Equal up to rounding: tokens whose logprobs are nearly the same may change places."""
    assert (expected is None) == (got is None)
    for place, (one, other) in enumerate(zip(expected or (), got or (), strict=True)):
        values, found = ([p for _, p in sorted(d.values(), key=_descending)] for d in (one, other))
        assert len(values) == len(found), f"place {place}"
        assert max((abs(a - b) for a, b in zip(values, found, strict=True)), default=0) <= tolerance
        for token, (rank, logprob) in one.items():
            if token not in other:  # the last of the list, where it ties with one not in it
                assert logprob - min(values) <= tolerance, f"{token}, place {place}"
                continue
            assert abs(other[token][0] - rank) <= 1, f"rank of {token}, place {place}"
            assert abs(other[token][1] - logprob) <= tolerance, f"{token}, place {place}"


def _descending(entry: tuple[int, float]) -> float:
    return -entry[1]


def by_seed(results: Iterable[Outcome]) -> dict[int, tuple[int, ...]]:
    """What `planted_by_seed` takes."""
    return {result.seed: result.tokens for result in results if result.seed is not None}


def _plain(logprobs: Any) -> Logprobs | None:
    if logprobs is None:
        return None
    return [
        {token: (entry.rank, entry.logprob) for token, entry in (position or {}).items()}
        for position in logprobs
    ]
