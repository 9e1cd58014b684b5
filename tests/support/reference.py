"""Plain vLLM's output, and whether it is usable as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM

from support.engines import Completion, Prompt, completion_of, generate, greedy

# Two fp32 runs may differ where the best two logits are within rounding errors (about 1e-5 here).
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Reference:
    """Greedy outputs of plain vLLM, without near-ties."""

    prompts: list[Prompt]
    completions: list[Completion]
    dropped: int  # prompts whose output has a near-tie

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in self.completions]

    def part(self, start: int, count: int) -> Reference:
        """A part of it, wrapping around."""
        chosen = [(start + i) % len(self.prompts) for i in range(count)]
        return Reference(
            [self.prompts[i] for i in chosen], [self.completions[i] for i in chosen], 0
        )


def plain_greedy(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> Reference:
    """Run plain vLLM; prompts with near-ties, where runs might differ, are dropped."""
    outputs = generate(llm, prompts, greedy(max_tokens, logprobs=2))
    kept = [
        (list(prompt), completion_of(output.outputs[0]))
        for prompt, output in zip(prompts, outputs, strict=True)
        if min(map(top_gap, output.outputs[0].logprobs)) > NEAR_TIE
    ]
    return Reference([p for p, _ in kept], [c for _, c in kept], len(prompts) - len(kept))


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


@dataclass(frozen=True)
class Plain:
    prompts: Sequence[Prompt]
    outputs: list[tuple[int, ...]]
    logprobs: list[list[dict[int, Any]]]  # of the best few tokens, per request

    def gaps(self, got: Sequence[Sequence[int]]) -> list[float]:
        """How much less likely (in nats) our token was at each first difference; inf: unlisted."""
        found = []
        for ours, output, logprobs in zip(got, self.outputs, self.logprobs, strict=True):
            assert len(ours) == len(output)
            for token, best, options in zip(ours, output, logprobs, strict=True):
                if token != best:
                    far = float("inf")
                    other = options[token].logprob if token in options else -far
                    found.append(options[best].logprob - other)
                    break
        return found


def run_plain(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> Plain:
    outputs = generate(llm, prompts, greedy(max_tokens, logprobs=5))
    parts = [output.outputs[0] for output in outputs]
    return Plain(prompts, [tuple(p.token_ids) for p in parts], [p.logprobs for p in parts])
