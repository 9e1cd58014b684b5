"""Options of single requests; engines with and without trees, one after another in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import complete, engine, greedy, medusa, random_prompts, worker_of
from support.models import VOCAB
from support.planted import planted
from support.reference import Reference, differing, plain_greedy
from support.runner import on_v1, sized
from support.spies import assert_reported, mean_accepted, recorded_steps, tree_rows
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.integration.attention.cpu_attention import TreeAttentionBackend

pytestmark = pytest.mark.engine

TREE: Any = sized({"dense": [3, 2, 2]}, [[0], [1], [0, 0], [1, 0], [1, 0, 0]])
TOKENS = sized(24, 12)
# `tests/unit/test_config.py` has all other errors of these options.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mode": ({"extra_args": {"medusa": {"acceptance": "typcial"}}}, ["typcial", '"typical"']),
    "thinking": ({"thinking_token_budget": 5}, ["thinking_token_budget"]),
    "min_p": ({"min_p": 0.1, "temperature": 1.0}, ["min_p"]),
    "logit_bias": ({"logit_bias": {5: 1.0}, "temperature": 1.0}, ["logit_bias"]),
}


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    prompts = random_prompts(sized(12, 4), VOCAB, longest=sized(100, 30), seed=31)
    with on_v1(), engine(chaotic_llama) as llm:
        return plain_greedy(llm, prompts, TOKENS)


@pytest.fixture(scope="module")
def llm(reference: Reference, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    with engine(chaotic_llama, medusa(random_heads, TREE)) as llm:
        yield llm


def assert_works(llm: LLM, reference: Reference) -> None:
    got, steps, _ = reference.planted_on(llm)
    assert_reported(steps, reference.prompts, got)
    assert mean_accepted(steps) > 1.2


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone(llm: LLM, reference: Reference, name: str) -> None:
    options, words = BAD[name]
    bad = greedy(TOKENS, **options)
    params: list[SamplingParams] = [greedy(TOKENS), bad, greedy(TOKENS)]
    with pytest.raises(VLLMValidationError) as caught:  # the server's status 400
        complete(llm, reference.prompts[:3], params)
    for word in words:
        assert word in str(caught.value)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
    assert_works(llm, reference)


def test_drafting_delays_no_token(
    llm: LLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end gets a step's tokens from `update_from_output`; drafting follows, on V1."""
    core: Any = llm.llm_engine.engine_core
    order: list[str] = []

    def note(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kw: order.append(name) or call(*args, **kw)
        )

    note(core.engine_core.scheduler, "update_from_output")
    note(worker_of(llm).model_runner.drafter, "draft")
    complete(llm, reference.prompts[:1], greedy(8))
    assert order[:4] == ["update_from_output", "draft"] * 2


def test_a_request_limits_its_drafts(llm: LLM, reference: Reference) -> None:
    """0: as in plain vLLM; 2: at most two nodes; other requests in the batch have whole trees."""
    part, limits = reference.part(0, 3), (0, 2, None)
    own = [{} if n is None else {"medusa": {"max_draft_tokens": n}} for n in limits]
    with planted(part.prompts, part.outputs, VOCAB), recorded_steps() as steps:
        got = complete(llm, part.prompts, [greedy(TOKENS, extra_args=each) for each in own])
    assert differing(part.completions, got) == []
    rows = [row for step in steps for row in step]
    most = {
        p: max(row.num_nodes for row in rows if row.prompt == p) for p in map(tuple, part.prompts)
    }
    whole = llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
    assert list(most.values()) == [1, 3, 1 + whole]
    assert any(row.accepted for row in rows if row.num_nodes == 3)


def test_engines_in_a_row(
    reference: Reference, chaotic_llama: str, random_heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees twice from the same dict, then plain vLLM, all in this process.

    Our attention backend stays registered; without trees its results equal those of vLLM's own.
    """
    given = medusa(random_heads, [[0], [1], [0, 0]], acceptance="lossless")
    kept = copy.deepcopy(given)
    for _ in range(2):
        with recorded_steps() as steps, engine(chaotic_llama, given) as llm:
            got = complete(llm, reference.prompts, greedy(TOKENS))
        assert differing(reference.completions, got) == []
        assert len(tree_rows(steps)) > len(reference.prompts)
    assert given == kept
    monkeypatch.setattr(AttentionBackendEnum, "clear_override", lambda self: None)
    with recorded_steps() as steps, engine(chaotic_llama) as llm:
        assert AttentionBackendEnum.CPU_ATTN.get_class() is TreeAttentionBackend
        got = complete(llm, reference.prompts, greedy(TOKENS))
    assert differing(reference.completions, got) == []
    assert steps == []
