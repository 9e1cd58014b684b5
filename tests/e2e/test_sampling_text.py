"""What needs a tokenizer: banned words and grammars, on the demo model with its trained heads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from support.demo import HEADS, TARGET, VOCAB, demo_prompts, tokenizer
from support.engines import engine, medusa
from support.outcomes import Outcome, assert_same, by_seed, outcomes, seeded, steady_outcomes
from support.planted import planted_by_seed
from support.spies import mean_accepted, recorded_steps
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

WORDS = ["return", "self", "if not", "for i in", "import", "()", ":"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
GRAMMARS = {
    "choice": StructuredOutputsParams(choice=["positive", "negative", "neither of them"]),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,9}\.[0-9]{2,6} (yes|no)"),
    "json": StructuredOutputsParams(json=json.dumps(SCHEMA)),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return demo_prompts(0, 6)


def cases() -> dict[str, list[SamplingParams]]:
    return {
        "sampled": seeded(6, 0, temperature=0.8, top_p=0.95, detokenize=True, ignore_eos=False),
        "banned": seeded(6, 1000, temperature=0.7, bad_words=WORDS),
        "greedy_banned": seeded(6, 2000, temperature=0.0, bad_words=WORDS, logprobs=1),
        "penalised": seeded(6, 3000, temperature=0.8, bad_words=WORDS[:2], repetition_penalty=1.2),
        "stop_text": seeded(6, 4000, temperature=0.8, stop=["\n\n", "):"], detokenize=True),
        "grammar": [
            param
            for i, grammar in enumerate(GRAMMARS.values())
            for param in seeded(
                2, 5000 + 100 * i, temperature=0.8 * (i != 1), structured_outputs=grammar,
                ignore_eos=False, detokenize=True, min_tokens=12 * (i == 0),
            )
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[str, list[Outcome]]:
    with engine(TARGET, skip_tokenizer_init=False) as llm:
        return {name: steady_outcomes(llm, prompts, params) for name, params in cases().items()}


@pytest.fixture(scope="module")
def llm(plain: object) -> Iterator[LLM]:
    with engine(TARGET, medusa(HEADS, "heads"), skip_tokenizer_init=False) as llm:
        yield llm


def test_the_cases_do_something(plain: dict[str, list[Outcome]]) -> None:
    texts = {name: [tokenizer().decode(o.tokens) for o in plain[name]] for name in plain}
    assert not any(word in text for text in texts["greedy_banned"] for word in ("return", "self"))
    assert any("return" in text or "self" in text for text in texts["sampled"])
    assert any(o.completion.stop_reason in ("\n\n", "):") for o in plain["stop_text"])
    grammars = [text.removesuffix("</s>") for text in texts["grammar"]]
    assert set(grammars[:2]) <= {"positive", "negative", "neither of them"}
    assert all(re.fullmatch(r"[a-z]{3,9}\.[0-9]{2,6} (yes|no)", text) for text in grammars[2:4])


@pytest.mark.parametrize("name", [name for name in cases() if name != "grammar"])
def test_trained_heads(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]], name: str
) -> None:
    with recorded_steps() as steps:
        got = outcomes(llm, prompts, cases()[name])
    assert_same(plain[name], got)
    assert mean_accepted(steps) > 0.1


@pytest.mark.parametrize("name", ["banned", "greedy_banned", "penalised"])
def test_planted(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]], name: str
) -> None:
    with planted_by_seed(by_seed(plain[name]), VOCAB), recorded_steps() as steps:
        got = outcomes(llm, prompts, cases()[name])
    assert_same(plain[name], got)
    assert mean_accepted(steps) > 1.0


def test_grammars_beside_drafts(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]]
) -> None:
    """A request that follows a grammar gets no drafts; the others in its batch do."""
    names = ["grammar", "sampled", "banned"]
    params = [param for name in names for param in cases()[name]]
    with recorded_steps() as steps:
        got = outcomes(llm, prompts * 3, params)
    assert_same([o for name in names for o in plain[name]], got)
    assert any(len({row.is_tree for row in step}) == 2 for step in steps)
    alone = outcomes_steps(llm, prompts, cases()["grammar"])
    assert not any(row.is_tree for step in alone for row in step)


def outcomes_steps(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    with recorded_steps() as steps:
        outcomes(llm, prompts, params)
    return steps
