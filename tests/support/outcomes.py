"""Requests with their own sampling parameters, and their complete outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.sample.sampler import Sampler

from support.engines import Completion, Prompt, completion_of, generate, random_prompts
from support.models import VOCAB
from support.planted import planted_by_seed
from support.runner import ON_V2, sized
from support.spies import Step, recorded_steps

if ON_V2:
    from vllm.v1.worker import cpu_worker  # noqa: F401  before any V2 module
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

Logprobs = list[dict[int, tuple[int, float]]]  # per token: id -> (rank, logprob)


@dataclass(frozen=True)
class Outcome:
    """One output of a request; a request with ``n=3`` has three."""

    seed: int | None  # seed of this output: vLLM adds the output's number
    completion: Completion
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    steady: bool = True  # rounding errors would not change the tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.token_ids


def outcomes(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[Outcome]:
    results = generate(llm, prompts, list(params), adapters)
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


def assert_same_with_trees(
    llm: LLM, expected: Sequence[Outcome], *given: Any, miss: float = 0.1
) -> list[Step]:
    """`outcomes` with the expected tokens planted as drafts must be the same; returns the steps."""
    with planted_by_seed(by_seed(expected), VOCAB, miss=miss), recorded_steps() as steps:
        got = outcomes(llm, *given)
    assert_same(expected, got)
    return steps


def steady_outcomes(llm: LLM, *given: Any) -> list[Outcome]:
    """`outcomes` of plain vLLM, as a reference; those with a near-tie in sampling are marked.

    Such an output changes if the logits change by slightly more than the difference between two
    runs (1e-5). On V2, where few tokens are sampled, they are assumed to have no near-ties.
    """
    results = outcomes(llm, *given)
    for seed in range(sized(2, 0)):
        with jittered(5e-5, seed):
            again = outcomes(llm, *given)
        results = [
            replace(result, steady=result.steady and result.tokens == other.tokens)
            for result, other in zip(results, again, strict=True)
        ]
    return results


@contextmanager
def jittered(scale: float, seed: int) -> Iterator[None]:
    """Within the block, noise is added to the logits of every sampler."""
    generator = torch.Generator().manual_seed(seed)
    owner, name = (SamplerV2, "__call__") if ON_V2 else (Sampler, "forward")
    original = getattr(owner, name)

    def sample(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        noise = torch.randn(logits.shape, generator=generator)
        return original(self, logits + scale * noise, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, sample)
        yield


def seeded(count: int, first_seed: int, **options: Any) -> list[SamplingParams]:
    """Parameters that differ only in their seed."""
    defaults = {"max_tokens": sized(40, 14), "ignore_eos": True, "detokenize": False}
    return [SamplingParams(seed=first_seed + 10 * i, **defaults | options) for i in range(count)]


def one_of_each() -> tuple[list[Prompt], list[SamplingParams]]:
    """A batch that covers every branch of the verification, and what depends on a path's tokens."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "logprobs": 2, "top_k": 20},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_p": 0.8, "min_tokens": 5, "stop_token_ids": [7, 8]},
    ]
    params = [seeded(1, 100 + i, max_tokens=8, **kind)[0] for i, kind in enumerate(kinds)]
    return random_prompts(len(kinds), VOCAB, longest=30, seed=3), params


def assert_same(expected: Sequence[Outcome], got: Sequence[Outcome]) -> None:
    """Tokens, lengths, reasons, logprobs (to 1e-4), the lists of most probable tokens."""
    pairs = [pair for pair in zip(expected, got, strict=True) if pair[0].steady]
    assert len(pairs) >= 0.75 * len(expected), "too few outputs that are stable under rounding"
    for one, other in pairs:
        assert one.completion == other.completion
        assert_close(one.logprobs, other.logprobs)
        assert_close(one.prompt_logprobs, other.prompt_logprobs)


def assert_close(expected: Logprobs | None, got: Logprobs | None, tolerance: float = 1e-4) -> None:
    """Equal up to rounding: tokens with nearly equal logprobs may swap places."""
    assert (expected is None) == (got is None)
    for place, (one, other) in enumerate(zip(expected or (), got or (), strict=True)):
        values, found = ([p for _, p in sorted(d.values(), key=_descending)] for d in (one, other))
        assert len(values) == len(found), f"place {place}"
        assert max((abs(a - b) for a, b in zip(values, found, strict=True)), default=0) <= tolerance
        for token, (rank, logprob) in one.items():
            if token not in other:  # the last of the list, in a near-tie with one outside it
                assert logprob - min(values) <= tolerance, f"{token}, place {place}"
                continue
            assert abs(other[token][0] - rank) <= 1, f"rank of {token}, place {place}"
            assert abs(other[token][1] - logprob) <= tolerance, f"{token}, place {place}"


def _descending(entry: tuple[int, float]) -> float:
    return -entry[1]


def by_seed(results: Iterable[Outcome]) -> dict[int, tuple[int, ...]]:
    """The argument of `planted_by_seed`."""
    return {result.seed: result.tokens for result in results if result.seed is not None}


def _plain(logprobs: Any) -> Logprobs | None:
    if logprobs is None:
        return None
    return [
        {token: (entry.rank, entry.logprob) for token, entry in (position or {}).items()}
        for position in logprobs
    ]
