"""What plain vLLM on one rank says: what several ranks are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

from support.engines import Prompt, engine, random_prompts
from support.models import VOCAB
from support.outcomes import Outcome, seeded, steady_outcomes
from support.ranks import request_key
from support.reference import Reference, plain_greedy

TOKENS = 48
COMMON: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
Known = list[tuple[int, list[int]]]  # what `RecordingWorker.plant` takes


@dataclass(frozen=True)
class Plain:
    """Requests and their outcome without speculation, greedy and at temperature 1."""

    greedy: Reference
    prompts: list[Prompt]  # of the seeded requests
    params: list[SamplingParams]
    seeded: list[Outcome]

    @property
    def known_greedy(self) -> Known:
        """The future of the greedy requests."""
        pairs = zip(self.greedy.prompts, self.greedy.outputs, strict=True)
        return [(request_key(prompt, None), list(output)) for prompt, output in pairs]

    @property
    def known_seeded(self) -> Known:
        """The future of the seeded requests."""
        pairs = zip(self.prompts, self.seeded, strict=True)
        return [(request_key(prompt, o.seed), list(o.tokens)) for prompt, o in pairs]

    @property
    def unsteady(self) -> set[int]:
        """Keys of seeded requests that rounding may change."""
        pairs = zip(self.prompts, self.seeded, strict=True)
        return {request_key(prompt, o.seed) for prompt, o in pairs if not o.steady}

    def unlike_seeded(self, completions: list[Any]) -> list[int]:
        """Indices at which the first of the seeded requests were answered otherwise."""
        pairs = zip(self.seeded, completions, strict=False)
        return [i for i, (o, got) in enumerate(pairs) if o.steady and o.completion != got]


def plain_vllm(model: str) -> Plain:
    """Ask plain vLLM, in this process."""
    prompts = random_prompts(96, VOCAB, longest=60, seed=41)
    params = seeded(len(prompts), 7000, max_tokens=TOKENS, temperature=1.0)
    with engine(model) as llm:
        greedy = plain_greedy(llm, prompts, TOKENS)
        return Plain(greedy, prompts, params, steady_outcomes(llm, prompts, params))
