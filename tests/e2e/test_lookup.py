"""Lookup in whole engines: plain vLLM's tokens for any copies, and more tokens per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.assets import HEADS, TARGET, code_prompts
from support.budgets import fickle, policy_of, verify_all
from support.engines import Completion, complete, engine, greedy, metric, random_prompts
from support.models import VOCAB
from support.planted import PlantedCopies
from support.reference import differing, plain_greedy
from support.spies import recorded_steps, tree_rows
from vllm import LLM, SamplingParams

from vllm_medusa.integration.startup import startup_timing
from vllm_medusa.lookup import lookup as lookup_module
from vllm_medusa.lookup.lookup import Lookup

pytestmark = pytest.mark.engine

TOKENS = 32
Patch = pytest.MonkeyPatch


def mixed(count: int, first: int = 0) -> list[SamplingParams]:
    """Every third request samples, some with penalties or logprobs."""
    sampled = {"temperature": 0.8, "presence_penalty": 0.3, "logprobs": 1}
    return [
        greedy(TOKENS, **(sampled if place % 3 == 2 else {}), seed=first + place)
        for place in range(count)
    ]


@pytest.fixture(scope="module")
def expected(chaotic_llama: str) -> tuple[list[list[int]], list[Completion]]:
    """Plain vLLM's outputs; some prompts are prefixes of others."""
    with engine(chaotic_llama) as llm:
        prompts = random_prompts(14, VOCAB, shortest=8, longest=120)
        prompts += [[*prompt[:70], 5, 6] for prompt in prompts if len(prompt) > 80]
        prompts = plain_greedy(llm, prompts, TOKENS).prompts
        return prompts, complete(llm, prompts, mixed(len(prompts)))


@pytest.fixture(scope="module")
def llm(chaotic_llama: str, expected: Any) -> Iterator[LLM]:
    """No heads. Few blocks, so that requests are preempted; step costs are measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup_timing, "_PLAN", ((1, (0, 4)),))
        patch.setattr(startup_timing, "SECONDS", 300.0)
        config = {"method": "medusa", "lookup": True}
        blocks = {"block_size": 32, "num_gpu_blocks_override": 34, "enable_prefix_caching": True}
        with engine(chaotic_llama, config, **blocks) as llm:
            yield llm


def run(llm: LLM, expected: Any, patch: Patch, shift: int = 0) -> tuple[float, int]:
    """The mean and max number of accepted drafts per request and step."""
    prompts, completions = expected
    texts = [[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)]
    PlantedCopies(texts, shift).plant(patch)
    fickle(patch, llm, preempting=True)
    with recorded_steps() as steps:
        got = complete(llm, prompts, mixed(len(prompts)))
    assert differing(completions, got) == []
    accepted = [row.accepted for row in tree_rows(steps)]
    return float(np.mean(accepted or 0)), max(accepted, default=0)


def test_long_chains_are_verified(llm: LLM, expected: Any, monkeypatch: Patch) -> None:
    """Deeper than any heads reach, with plain rows and prefills, also after preemption."""
    assert policy_of(llm).cost.steps > 0  # dummy chains were timed
    before = metric(llm, "num_preemptions"), metric(llm, "lookup_accepted_tokens")
    mean, maximum = run(llm, expected, monkeypatch)
    assert mean > 4 and maximum > 15
    assert metric(llm, "num_preemptions") > before[0]
    all_accepted = metric(llm, "spec_decode_num_accepted_tokens")
    assert 0 < metric(llm, "lookup_accepted_tokens") - before[1] <= all_accepted


def below_the_root(patch: Patch) -> None:
    """Every node of a chain is a child of the root."""
    own = lookup_module.join

    def wrong(*args: Any) -> Any:
        found = own(*args)
        return replace(found, parents=found.parents.clamp_max(0))

    patch.setattr(lookup_module, "join", wrong)


@pytest.mark.parametrize("control", [below_the_root, 1], ids=["wrong parent", "one token off"])
def test_a_wrong_chain_costs_acceptance(
    llm: LLM, expected: Any, monkeypatch: Patch, control: Callable[[Patch], None] | int
) -> None:
    """Tokens stay equal: the walk uses the same tree as attention."""
    right, _ = run(llm, expected, monkeypatch)
    if callable(control):
        control(monkeypatch)
    shift = control if isinstance(control, int) else 0
    assert run(llm, expected, monkeypatch, shift)[0] < 0.6 * right


def test_searches_become_rare_while_no_copy_is_used(
    llm: LLM, expected: Any, monkeypatch: Patch
) -> None:
    prompts, _ = expected
    policy, searches = policy_of(llm), []
    extend = Lookup.extend

    def counted(self: Any, *args: Any) -> Any:
        searches.append(1)
        return extend(self, *args)

    monkeypatch.setattr(Lookup, "extend", counted)
    monkeypatch.setattr(policy, "total", lambda *_, **__: 0)
    complete(llm, prompts[:1], greedy(120))
    assert 16 <= len(searches) < 16 + 120 / 4
    monkeypatch.undo()
    monkeypatch.setattr(Lookup, "extend", counted)
    searches.clear()
    with monkeypatch.context() as patch:
        verify_all(patch, policy)
        PlantedCopies([[*prompts[0], *expected[1][0].token_ids]], 0).plant(patch)
        got = complete(llm, prompts[:1], mixed(1))
    assert differing(expected[1][:1], got) == []
    assert max(got[0].accepted) > 1


def test_copies_are_merged_with_head_drafts(monkeypatch: Patch) -> None:
    """On repetitive texts, more drafts are accepted than with heads alone, and tokens are equal."""
    prompts = code_prompts(0, 6)
    with engine(TARGET) as llm:
        first = complete(llm, prompts, greedy(TOKENS))
        extended = [[*p, *c.token_ids, *p] for p, c in zip(prompts, first, strict=True)]
        extended = plain_greedy(llm, extended, TOKENS).prompts
        plain = complete(llm, extended, mixed(len(extended), 100))
    config = {"method": "medusa", "model": HEADS, "lookup": True, "budget": 12}

    def steps(llm: LLM) -> int:
        got = complete(llm, extended, mixed(len(extended), 100))
        assert differing(plain, got) == []
        return sum(len(each.accepted) for each in got)

    with engine(TARGET, config) as llm:
        both = steps(llm)
        copied = metric(llm, "lookup_accepted_tokens")
        assert 0 < copied < metric(llm, "spec_decode_num_accepted_tokens")
        monkeypatch.setattr(Lookup, "extend", lambda *args: args[5])
        assert both < 0.7 * steps(llm)
        assert metric(llm, "lookup_accepted_tokens") == copied
