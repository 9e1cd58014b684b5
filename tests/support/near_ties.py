"""Plain vLLM's greedy outputs, and by how much differing ones are less likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM

from support.engines import generate, greedy

Prompts = Sequence[list[int]]


@dataclass(frozen=True)
class Plain:
    prompts: Prompts
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


def run_plain(llm: LLM, prompts: Prompts, max_tokens: int) -> Plain:
    outputs = generate(llm, prompts, greedy(max_tokens, logprobs=5))
    parts = [output.outputs[0] for output in outputs]
    return Plain(prompts, [tuple(p.token_ids) for p in parts], [p.logprobs for p in parts])
