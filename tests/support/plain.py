"""Outputs of plain vLLM on one rank, and of several ranks for the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from vllm import LLM, SamplingParams

from support.engines import Completion, Prompt, complete, engine, greedy, random_prompts
from support.models import VOCAB
from support.outcomes import Outcome, seeded, steady_outcomes
from support.ranks import Decision, decisions, request_key
from support.reference import Reference, plain_greedy
from support.runner import ON_V2, on_v1, sized

TOKENS = sized(48, 12)
COMMON: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
Known = list[tuple[int, list[int]]]  # argument of `RecordingWorker.plant`


@dataclass(frozen=True)
class Plain:
    """Requests and their outcome without speculation, greedy and at temperature 1."""

    greedy: Reference
    prompts: list[Prompt]  # of the seeded requests
    params: list[SamplingParams]
    seeded: list[Outcome]

    @property
    def known_greedy(self) -> Known:
        pairs = zip(self.greedy.prompts, self.greedy.outputs, strict=True)
        return [(request_key(prompt, None), list(output)) for prompt, output in pairs]

    @property
    def known_seeded(self) -> Known:
        pairs = zip(self.prompts, self.seeded, strict=True)
        return [(request_key(prompt, o.seed), list(o.tokens)) for prompt, o in pairs]

    @property
    def unsteady(self) -> set[int]:
        """Keys of seeded requests that rounding may change."""
        pairs = zip(self.prompts, self.seeded, strict=True)
        return {request_key(prompt, o.seed) for prompt, o in pairs if not o.steady}

    def unlike_seeded(self, completions: list[Any]) -> list[int]:
        """Indices of seeded requests (from the first) with other answers."""
        pairs = zip(self.seeded, completions, strict=False)
        return [i for i, (o, got) in enumerate(pairs) if o.steady and o.completion != got]


def plain_vllm(model: str) -> Plain:
    prompts = random_prompts(sized(96, 5), VOCAB, longest=sized(60, 20), seed=41)
    params = seeded(len(prompts), 7000, max_tokens=TOKENS, temperature=1.0)
    with on_v1(), engine(model) as llm:
        greedy = plain_greedy(llm, prompts, TOKENS)
        if not ON_V2:
            return Plain(greedy, prompts, params, steady_outcomes(llm, prompts, params))
    with engine(model) as llm:
        return Plain(greedy, prompts, params, steady_outcomes(llm, prompts, params))


@dataclass(frozen=True)
class Run:
    """Requests answered by an engine whose workers are `RecordingWorker`."""

    completions: list[Completion]
    ranks: list[list[Decision]]

    @property
    def trees(self) -> list[Decision]:
        return [decision for decision in self.ranks[0] if decision.num_nodes > 1]

    def differing(self) -> int:
        """Number of decisions that differ between ranks, in order of creation."""
        return sum(len(set(alike)) > 1 for alike in zip_longest(*self.ranks))


def run(llm: LLM, prompts: Sequence[Prompt], params: Any, known: Known | None = None) -> Run:
    """Run requests; drafts are planted where future tokens are known."""
    llm.collective_rpc("plant", args=(known or [],))
    completions = complete(llm, prompts, params)
    return Run(completions, [decisions(r) for r in llm.collective_rpc("take_decisions")])


def run_greedy(llm: LLM, plain: Plain, count: int | None = None) -> Run:
    return run(llm, plain.greedy.prompts[:count], greedy(TOKENS), plain.known_greedy)


def run_seeded(llm: LLM, plain: Plain, count: int | None = None) -> Run:
    return run(llm, plain.prompts[:count], plain.params[:count], plain.known_seeded)


def assert_same_decisions(alone: Run, shared: Run, left_out: set[int]) -> None:
    """Decisions of one rank and of several are equal, except near-ties of drafts."""
    one, other = (
        sorted(d for d in result.ranks[0] if d.request not in left_out)
        for result in (alone, shared)
    )
    assert [d[:-1] for d in one] == [d[:-1] for d in other]
    drafts = sum(a.drafts != b.drafts for a, b in zip(one, other, strict=True))
    assert drafts <= 0.01 * len(one)
