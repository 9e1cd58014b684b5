"""Features that need a tokenizer: bad words and grammars, on the test model with trained heads."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.assets import HEADS, TARGET, code_prompts, tokenizer
from support.budgets import fickle, policy_of, scheduler_of
from support.engines import complete, engine, medusa
from support.mtp import save_as_mimo
from support.outcomes import (
    Outcome,
    assert_same,
    assert_same_with_trees,
    outcomes,
    seeded,
    steady_outcomes,
)
from support.spies import mean_accepted, recorded_steps
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_medusa.budget.policy import AutoBudget
from vllm_medusa.integration.scheduling import grammar as grammars
from vllm_medusa.integration.scheduling import grammar_drafts
from vllm_medusa.integration.scheduling.grammar import Chance, fill_masks
from vllm_medusa.integration.startup import startup_timing

pytestmark = pytest.mark.engine


def depth_of(parents: Sequence[int]) -> int:
    """Depth of a tree, from the parents of its drafts."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


THINKING = ReasoningConfig(reasoning_start_str="(", reasoning_end_str="return x is done")
ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "reasoning_config": THINKING}
WORDS = ["return", "self", "if not", "for i in", "import", "()", ":"]
FOLLOWED = ["grammar", "greedy_grammar"]  # cases with one request per entry of GRAMMARS
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
CALL = {
    "type": "object",
    "properties": {
        "function": {"enum": ["search", "open_file", "run_tests"]},
        "arguments": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "recursive": {"type": "boolean"}},
            "required": ["path", "recursive"],
        },
    },
    "required": ["function", "arguments"],
}
TAG = {
    "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
    "triggers": ["<call>"],
}
GRAMMARS = {
    "choice": StructuredOutputsParams(choice=["positive", "negative", "neither of them"]),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,9}\.[0-9]{2,6} (yes|no)"),
    "json": StructuredOutputsParams(json=json.dumps(SCHEMA)),
    "call": StructuredOutputsParams(json=json.dumps(CALL)),
    "rules": StructuredOutputsParams(
        grammar='root ::= "SELECT DISTINCT (name), " [a-z]+ (", " [a-z]+)* " FROM t"'
    ),
    "tag": StructuredOutputsParams(structural_tag=json.dumps(TAG)),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return code_prompts(0, 6)


def cases() -> dict[str, list[SamplingParams]]:
    return {
        "sampled": seeded(6, 0, temperature=0.8, top_p=0.95, detokenize=True, ignore_eos=False),
        "banned": seeded(6, 1000, temperature=0.7, bad_words=WORDS),
        "greedy_banned": seeded(6, 2000, temperature=0.0, bad_words=WORDS, logprobs=1),
        "penalized": seeded(6, 3000, temperature=0.8, bad_words=WORDS[:2], repetition_penalty=1.2),
        "thinking": [
            param
            for i, budget in enumerate((3, 6, 11))
            for param in seeded(
                2, 3500 + 100 * i, temperature=0.8 * (i != 1), thinking_token_budget=budget
            )
        ],
        "stop_text": seeded(6, 4000, temperature=0.8, stop=["\n\n", "):"], detokenize=True),
        "grammar": [
            seeded(
                1, 5000 + 10 * i, temperature=0.8, structured_outputs=grammar,
                ignore_eos=False, detokenize=True, min_tokens=12 * (name == "choice"),
            )[0]
            for i, (name, grammar) in enumerate(GRAMMARS.items())
        ],
        "greedy_grammar": [
            seeded(1, 6000 + 10 * i, temperature=0.0, structured_outputs=grammar,
                   ignore_eos=False, logprobs=1)[0]
            for i, grammar in enumerate(GRAMMARS.values())
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> dict[str, list[Outcome]]:
    with engine(TARGET, **ENGINE) as llm:
        return {name: steady_outcomes(llm, prompts, params) for name, params in cases().items()}


@pytest.fixture(scope="module")
def llm(plain: object) -> Iterator[LLM]:
    with engine(TARGET, medusa(HEADS, "heads"), **ENGINE) as llm:
        yield llm


def test_the_cases_have_an_effect(plain: dict[str, list[Outcome]]) -> None:
    texts = {name: [tokenizer().decode(o.tokens) for o in plain[name]] for name in plain}
    assert not any(word in text for text in texts["greedy_banned"] for word in ("return", "self"))
    assert any("return" in text or "self" in text for text in texts["sampled"])
    assert any(o.completion.stop_reason in ("\n\n", "):") for o in plain["stop_text"])
    for name in FOLLOWED:
        assert sum(o.completion.finish_reason == "stop" for o in plain[name]) >= 3
    assert_valid([o for name in FOLLOWED for o in plain[name]])


def assert_valid(results: list[Outcome]) -> None:
    """Finished outputs follow their grammars, in the order of `GRAMMARS`, repeated."""
    for name, outcome in zip(itertools.cycle(GRAMMARS), results, strict=False):
        text = tokenizer().decode(outcome.tokens).removesuffix("</s>")
        if outcome.completion.finish_reason != "stop":
            assert outcome.completion.finish_reason == "length"
        elif name == "choice":
            assert text in ("positive", "negative", "neither of them")
        elif name == "regex":
            assert re.fullmatch(r"[a-z]{3,9}\.[0-9]{2,6} (yes|no)", text)
        elif name == "json":
            assert set(json.loads(text)) == set(SCHEMA["required"])
        elif name == "call":
            assert json.loads(text)["function"] in ("search", "open_file", "run_tests")
        elif name == "rules":
            assert re.fullmatch(r"SELECT DISTINCT \(name\), [a-z]+(, [a-z]+)* FROM t", text)


@pytest.mark.parametrize("name", [name for name in cases() if name not in FOLLOWED])
def test_planted(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]], name: str
) -> None:
    steps = assert_same_with_trees(llm, plain[name], prompts, cases()[name])
    assert mean_accepted(steps) > 1.0


def run_grammars(
    llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]], names: Sequence[str]
) -> float:
    """Requests with and without grammars in one batch: plain vLLM's tokens; returns tau."""
    params = [param for name in names for param in cases()[name]]
    expected = [o for name in names for o in plain[name]]
    with recorded_steps() as steps:
        got = outcomes(llm, prompts * len(names), params)
    assert_same(expected, got)
    assert_valid(got[: len(FOLLOWED) * len(GRAMMARS)])
    return 1 + mean_accepted(steps)


def test_grammars(llm: LLM, plain: dict[str, list[Outcome]], prompts: list[list[int]]) -> None:
    """Every node has the mask of its own path, also in batches with unconstrained requests."""
    assert run_grammars(llm, plain, prompts, FOLLOWED) > 1.8
    run_grammars(llm, plain, prompts, [*FOLLOWED, "sampled", "banned"])


def of_the_parent(
    grammar: Any, masks: Any, root: int, token_ids: Sequence[int], parents: Sequence[int]
) -> None:
    """Every node has its parent's mask."""
    fill_masks(grammar, masks, root, token_ids, parents)
    rows = masks[root : root + 1 + len(parents)].clone()
    masks[root + 1 : root + 1 + len(parents)] = rows[list(parents)]


def of_the_chain(
    grammar: Any, masks: Any, root: int, token_ids: Sequence[int], parents: Sequence[int]
) -> None:
    """Masks as if the nodes were a chain."""
    fill_masks(grammar, masks, root, token_ids, range(len(parents)))


@pytest.mark.parametrize("control", [of_the_parent, of_the_chain], ids=lambda f: f.__name__)
def test_masks_of_other_nodes_change_tokens(
    llm: LLM,
    plain: dict[str, list[Outcome]],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    control: Any,
) -> None:
    monkeypatch.setattr(grammar_drafts, "fill_masks", control)
    with pytest.raises(AssertionError):
        run_grammars(llm, plain, prompts, FOLLOWED)


def test_grammars_on_dynamic_trees(
    plain: dict[str, list[Outcome]], prompts: list[list[int]]
) -> None:
    """Few rows per step, so that drafts are truncated, and requests wait with their drafts."""
    config = {"method": "medusa", "model": HEADS, "budget": 10}
    small = {"max_num_seqs": 16, "max_num_batched_tokens": 96, "enable_chunked_prefill": True}
    with engine(TARGET, config, skip_tokenizer_init=False, **small) as llm:
        assert run_grammars(llm, plain, prompts, [*FOLLOWED, "sampled"]) > 1.3


def test_grammars_on_trees_of_an_mtp_module(
    plain: dict[str, list[Outcome]], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The test model as a MiMo; future tokens are planted on the module's trees."""
    target = save_as_mimo(TARGET, tmp_path / "target")
    config = {"method": "mtp", "tree": {"width": 3, "depth": 3}, "budget": 8}
    names = [*FOLLOWED, "sampled"]
    expected, params = ([o for name in names for o in by[name]] for by in (plain, cases()))
    with engine(target, config, skip_tokenizer_init=False) as llm:
        steps = assert_same_with_trees(llm, expected, prompts * len(names), params)
    assert mean_accepted(steps) > 1.0


def test_grammars_force_drafts_without_heads(
    plain: dict[str, list[Outcome]],
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Heads and the number of nodes vary per step; forced runs are deeper than the heads."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(startup_timing, "SECONDS", 0.0)
    monkeypatch.setattr(AutoBudget, "forced_pay", True)
    monkeypatch.setattr(grammars, "MIN_RUN_SURVIVAL", 0.1)
    monkeypatch.setattr(Chance, "value", 0.85)
    config = {"method": "medusa", "model": HEADS, "budget": "auto"}
    with engine(TARGET, config, skip_tokenizer_init=False, max_num_seqs=16) as llm:
        scheduler = scheduler_of(llm)
        deepest, forced_drafts = 0, 0
        forced, received = scheduler.grammar.forced, scheduler._received

        def forcing(request: Any) -> Any:
            nonlocal forced_drafts
            draft = forced(request)
            forced_drafts += len(draft.token_ids) if draft else 0
            return draft

        def receiving(message: Any) -> Any:
            nonlocal deepest
            drafts = received(message)
            depths = [depth_of(draft.parents) for draft in drafts.values() if draft.parents]
            deepest = max(deepest, 0, *depths)
            return drafts

        monkeypatch.setattr(scheduler.grammar, "forced", forcing)
        monkeypatch.setattr(scheduler, "_received", receiving)
        fickle(monkeypatch, llm, drafting=0.4)
        assert run_grammars(llm, plain, prompts, [*FOLLOWED, "sampled"]) > 1.2
        assert deepest > scheduler.grammar.depth and forced_drafts > 50
        assert policy_of(llm).acceptance.copies
        monkeypatch.setattr(policy_of(llm), "limit", lambda *_: 0)
        assert reused_ids(llm, prompts) > 0


def reused_ids(llm: LLM, prompts: list[list[int]]) -> int:
    """A request is aborted between two steps, and another one reuses its id immediately."""
    core: Any = llm.llm_engine.engine_core
    scheduler = scheduler_of(llm)
    make = llm.llm_engine.input_processor.process_inputs
    free = SamplingParams(temperature=0.0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    (expected,) = complete(llm, prompts[:1], free)
    followed = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(regex="(positive or negative and )+"),
    )
    waiting = 0
    for steps in range(2, 22):
        core.add_request(make("x", {"prompt_token_ids": prompts[1]}, followed, ("generate",)))
        while not scheduler.running:  # its grammar is compiled in the background
            assert scheduler.requests
            core.get_output()
        for _ in range(steps):
            core.get_output()
        core.abort_requests(["x"])
        waiting += len(scheduler.pending)
        core.add_request(make("x", {"prompt_token_ids": prompts[0]}, free, ("generate",)))
        got: list[int] = []
        while len(got) < 6:
            got += [t for output in core.get_output().outputs for t in output.new_token_ids]
        assert tuple(got) == expected.token_ids
    return waiting


class UntilColon(BaseThinkingReasoningParser):
    """The target has no end-of-thinking token; a colon is used instead."""

    start_token, end_token = "def", ":"  # type: ignore[assignment]


def test_grammars_after_reasoning() -> None:
    """A step never continues past the token that ends the reasoning: the grammar starts there."""
    ReasoningParserManager.register_module("until_colon", True, UntilColon)
    options = {
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"reasoning_parser": "until_colon"},
    }
    prompts, grammars = code_prompts(4, 16), itertools.cycle(GRAMMARS.values())
    params = [
        seeded(1, 7000 + i, temperature=0.0, structured_outputs=next(grammars), max_tokens=30)[0]
        for i in range(len(prompts))
    ]
    with engine(TARGET, **options) as llm:
        expected = outcomes(llm, prompts, params)
    with engine(TARGET, medusa(HEADS, "heads"), **options) as llm, recorded_steps() as steps:
        assert_same(expected, outcomes(llm, prompts, params))
    assert mean_accepted(steps) > 0.5
    texts = [tokenizer().decode(outcome.tokens) for outcome in expected]
    assert any(re.search(":(positive|negative|neither)", text) for text in texts)
