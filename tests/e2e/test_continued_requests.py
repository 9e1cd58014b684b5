"""Requests that continue where others end: after an ignored end token, or with later input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.assets import HEADS, TARGET, code_prompts, tokenizer
from support.engines import complete, engine
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

pytestmark = pytest.mark.engine

GUIDANCE: dict[str, Any] = {
    "structured_outputs_config": {"backend": "guidance"},
    "skip_tokenizer_init": False,
    "enable_prefix_caching": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "static": {"method": "medusa", "model": HEADS, "tree": "heads"},
    "dynamic": {"method": "medusa", "model": HEADS, "budget": 15, "lookup": True},
}
CHOICES = StructuredOutputsParams(choice=["positive", "negative"])
STOPS = [201, 14, 16, 90, 302]
TURNS = {
    "greedy": {"temperature": 0.0, "max_tokens": 7},
    "greedy_stops": {"temperature": 0.0, "max_tokens": 25, "stop_token_ids": STOPS[:4]},
    "seeded": {"temperature": 0.7, "seed": 5, "max_tokens": 6},
    "seeded_stops": {"temperature": 0.7, "seed": 5, "max_tokens": 25, "stop_token_ids": STOPS},
}
INPUTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n",
    "class A:\n    def __init__(self, x):\n        self.x = x\n",
    "    def y(self):\n",
    "    for i in range(10):\n        print(i)\n",
    "x = 1\n",
]


def ignoring(llm: LLM) -> list[Any]:
    """Tokens and finish reasons of requests that continue after the end of their grammar."""
    params = [
        SamplingParams(
            temperature=0.8 * (seed % 2), seed=seed, max_tokens=16, ignore_eos=True,
            structured_outputs=CHOICES,
        )
        for seed in range(4)
    ]  # fmt: skip
    got = complete(llm, code_prompts(0, 4), params)
    return [(each.token_ids, each.finish_reason) for each in got]


def session(llm: LLM, turn: dict[str, Any]) -> list[list[int]]:
    """The answer to each input; the next input is sent when an answer has ended."""
    core: Any = llm.llm_engine.engine_core
    make = llm.llm_engine.input_processor.process_inputs
    left, answers, name = [tokenizer().encode(text) for text in INPUTS], [], "session"

    def send() -> None:
        params = SamplingParams(ignore_eos=True, output_kind=RequestOutputKind.DELTA, **turn)
        request = make(
            name, {"prompt_token_ids": left.pop(0)}, params, ("generate",), resumable=True
        )
        core.add_request(request)
        answers.append([])

    send()
    for _ in range(200):
        for output in core.get_output().outputs:
            answers[-1] += output.new_token_ids
            if output.finish_reason is None:
                continue
            if not left:
                core.abort_requests([name])
                return answers
            send()
    raise AssertionError("the session never ends")


@pytest.fixture(scope="module")
def plain() -> tuple[list[Any], dict[str, Any]]:
    with engine(TARGET, **GUIDANCE) as llm:
        return ignoring(llm), {name: session(llm, turn) for name, turn in TURNS.items()}


@pytest.fixture(scope="module", params=CONFIGS)
def llm(request: pytest.FixtureRequest, plain: object) -> Iterator[LLM]:
    with engine(TARGET, CONFIGS[request.param], **GUIDANCE) as llm:
        yield llm


def test_after_the_end_of_a_grammar(llm: LLM, plain: tuple[list[Any], Any]) -> None:
    assert ignoring(llm) == plain[0]
    assert all(reason == "length" for _, reason in plain[0])


@pytest.mark.parametrize("name", TURNS)
def test_later_inputs(llm: LLM, plain: tuple[Any, dict[str, Any]], name: str) -> None:
    assert session(llm, TURNS[name]) == plain[1][name]
    assert len(plain[1][name]) == len(INPUTS)
