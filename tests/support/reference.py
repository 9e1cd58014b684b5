"""Plain vLLM's output, and whether it is usable as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM

from support.engines import Completion, Prompt, complete, completion_of, generate, greedy
from support.models import VOCAB
from support.planted import planted
from support.spies import Step, recorded_steps

# Two fp32 runs may differ where the best two logits are within rounding errors (about 1e-5 here).
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Reference:
    """Greedy outputs of plain vLLM."""

    prompts: list[Prompt]
    completions: list[Completion]
    logprobs: list[list[dict[int, Any]]]  # of the best few tokens, per request
    dropped: int = 0  # prompts whose output has a near-tie

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in self.completions]

    def part(self, start: int, count: int) -> Reference:
        """A part of it, wrapping around."""
        chosen = [(start + i) % len(self.prompts) for i in range(count)]
        fields = self.prompts, self.completions, self.logprobs
        return Reference(*([field[i] for i in chosen] for field in fields))

    def planted_on(self, llm: LLM) -> tuple[list[Completion], list[Step], list[int]]:
        """Plant these outputs as drafts; the engine's outcome must be equal in every respect.

        Returns its completions, its steps and the moves that `planted` records.
        """
        params = greedy(max(map(len, self.outputs)))
        with planted(self.prompts, self.outputs, VOCAB) as moves, recorded_steps() as steps:
            got = complete(llm, self.prompts, params)
        assert differing(self.completions, got) == []
        return got, steps, moves

    def gaps(self, got: Sequence[Completion]) -> list[float]:
        """How much less likely (in nats) our token was at each first difference; inf: unlisted."""
        found = []
        for ours, plain, logprobs in zip(got, self.outputs, self.logprobs, strict=True):
            for token, best, options in zip(ours.token_ids, plain, logprobs, strict=True):
                if token != best:
                    other = options[token].logprob if token in options else -float("inf")
                    found.append(options[best].logprob - other)
                    break
        return found


def plain_greedy(
    llm: LLM, prompts: Sequence[Prompt], max_tokens: int, min_gap: float = NEAR_TIE
) -> Reference:
    """Run plain vLLM; prompts are dropped if the best two logits come closer than ``min_gap``."""
    results = generate(llm, prompts, greedy(max_tokens, logprobs=5))
    outputs = [result.outputs[0] for result in results]
    kept = [i for i, o in enumerate(outputs) if min(map(top_gap, o.logprobs)) >= min_gap]
    return Reference(
        [list(prompts[i]) for i in kept],
        [completion_of(outputs[i]) for i in kept],
        [outputs[i].logprobs for i in kept],
        dropped=len(prompts) - len(kept),
    )


def top_gap(logprobs: dict[int, object]) -> float:
    """Distance of the best two logits of one position."""
    best, second, *_ = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
    return best - second


def assert_chaotic(outputs: Sequence[Sequence[int]], distinct: float = 0.6) -> None:
    """Outputs neither loop nor resemble each other; a share > ``distinct`` of tokens is distinct.

    Of n uniform draws among 512 tokens about 512 * (1 - exp(-n / 512)) are distinct: 46 of 48.
    """
    long = [tuple(output) for output in outputs if len(output) >= 24]
    assert len(long) >= len(outputs) / 2
    for output in long:
        assert len(set(output)) > distinct * len(output), f"repeats itself: {output}"
        for period in range(1, 9):
            assert output[-16:-period] != output[-16 + period :], f"loops: {output}"
    assert len({output[-8:] for output in long}) == len(set(long))


def differing(expected: Sequence[Completion], got: Sequence[Completion]) -> list[int]:
    """Indices of requests whose outcome differs in any respect."""
    assert len(expected) == len(got)
    return [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
