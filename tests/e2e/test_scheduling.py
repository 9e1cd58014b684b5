"""Equality with plain vLLM in all kinds of scheduling: chunks, mixed steps, cache hits, preemption.

Every test also asserts that the tested situation occurred.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from support.engines import (
    Completion,
    complete,
    drive,
    engine,
    generate,
    greedy,
    medusa,
    metric,
    random_prompts,
)
from support.models import STOPS, VOCAB
from support.planted import planted
from support.reference import Reference, assert_chaotic, differing, plain_greedy
from support.runner import async_scheduling, on_v1, sized
from support.spies import assert_reported, mean_accepted, mixed, recorded_steps, tree_rows
from torch._dynamo.utils import counters
from vllm import LLM
from vllm.config import CompilationMode

pytestmark = pytest.mark.engine

TOKENS = sized(72, 48)
SHORT_TOKENS = sized(72, 24)
LIMIT = 512  # max_model_len
BLOCK = 32
TREE = {"dense": [2, 2, 2]}
EOS = {"ignore_eos": False}
SCHEDULERS = sized([False], [True])  # whether async


@dataclass(frozen=True)
class Expected:
    """All reference outputs of plain vLLM, from one engine."""

    free: Reference  # TOKENS tokens each
    ended: list[Completion]  # same prompts, until an end token of the model
    short: Reference  # short prompts, SHORT_TOKENS tokens each
    at_limit: Reference  # prompts that leave little room below LIMIT
    waiting: Reference  # of `test_preemption`


@pytest.fixture(scope="module")
def expected(chaotic_llama: str) -> Expected:
    lengths = (511, 510, 509, 505, 498, 480, sized(450, 490))
    edge = [[3 + (7 * i + n) % 500 for i in range(n)] for n in lengths]
    long = random_prompts(sized(16, 1), VOCAB, shortest=20, longest=100, seed=41)
    with on_v1(), engine(chaotic_llama, max_model_len=LIMIT) as llm:
        free = plain_greedy(llm, random_prompts(sized(30, 7), VOCAB, seed=31), TOKENS)
        return Expected(
            free=free,
            ended=complete(llm, free.prompts, greedy(TOKENS, **EOS)),
            short=plain_greedy(
                llm, random_prompts(sized(16, 8), VOCAB, longest=20, seed=32), SHORT_TOKENS
            ),
            at_limit=plain_greedy(llm, edge, 200),
            waiting=plain_greedy(llm, long, 96),
        )


@pytest.fixture(scope="module", params=SCHEDULERS, ids=lambda ahead: "async" if ahead else "sync")
def llm(
    request: pytest.FixtureRequest, expected: Expected, chaotic_llama: str, random_heads: str
) -> Iterator[LLM]:
    """Small budget: prompts are chunked, and trees of 15 nodes are truncated."""
    with (
        async_scheduling() if request.param else nullcontext(),
        engine(
            chaotic_llama,
            medusa(random_heads, TREE),
            block_size=BLOCK,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_num_batched_tokens=96,
            max_num_seqs=8,
            max_model_len=LIMIT,
        ) as llm,
    ):
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == request.param
        yield llm


@pytest.fixture(autouse=True)
def _cold_cache(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        assert request.getfixturevalue("llm").reset_prefix_cache()


def test_the_reference_is_meaningful(expected: Expected) -> None:
    assert_chaotic(expected.free.outputs)
    assert len(expected.free.prompts) >= sized(27, 6) and len(expected.at_limit.prompts) >= 5


def test_chunked_prefill_and_mixed_steps(llm: LLM, expected: Expected) -> None:
    free = expected.free
    got, steps, moves = free.planted_on(llm)
    assert_reported(steps, free.prompts, got)
    assert sum(moves) > 0.7 * len(moves) and mean_accepted(steps) > 1.2
    assert sum(row.is_partial_prefill for step in steps for row in step) > sized(20, 5)
    assert len(mixed(steps)) > sized(20, 5)


def test_trees_are_truncated_to_the_budget(llm: LLM, expected: Expected) -> None:
    """Eight trees of 15 nodes do not fit into 96 tokens; the last ones are truncated."""
    short = expected.short
    got, steps, moves = short.planted_on(llm)
    assert_reported(steps, short.prompts, got)
    sizes = [row.num_nodes for row in tree_rows(steps)]
    assert 15 in sizes and sum(1 < size < 15 for size in sizes) > sized(10, 5)
    assert sum(moves) > 0.7 * len(moves)


def test_prefix_cache_hits_on_compacted_blocks(llm: LLM, expected: Expected) -> None:
    """The second prompts continue tree-decoded outputs, so they read compacted blocks."""
    free, done = expected.free, sized(48, 36)  # output tokens that become part of the prompt
    *_, moves = free.planted_on(llm)
    assert sum(moves) > 0.7 * len(moves)
    prompts = [[*p, *output[:done]] for p, output in zip(free.prompts, free.outputs, strict=True)]
    rest = [output[done:] for output in free.outputs]
    before = metric(llm, "prefix_cache_hits")
    with planted(prompts, rest, VOCAB):
        outputs = generate(llm, prompts, greedy(TOKENS - done))
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == rest
    cached = [output.num_cached_tokens for output in outputs]
    assert metric(llm, "prefix_cache_hits") - before == sum(cached) > 0
    compacted = [
        hit - len(prompt) for hit, prompt in zip(cached, free.prompts, strict=True)
    ]  # output tokens of the first pass that were read from the cache
    assert sum(count >= BLOCK // 2 for count in compacted) > len(prompts) / 2


def test_requests_end_exactly_at_max_model_len(llm: LLM, expected: Expected) -> None:
    edge = expected.at_limit
    got, steps, _ = edge.planted_on(llm)
    assert_reported(steps, edge.prompts, got)
    for prompt, completion in zip(edge.prompts, got, strict=True):
        assert len(prompt) + len(completion.token_ids) == LIMIT
        assert completion.finish_reason == "length"
    assert all(row.computed + row.scheduled <= LIMIT for step in steps for row in step)
    assert mean_accepted(steps) > 0.8


def test_end_tokens_of_the_model(llm: LLM, expected: Expected) -> None:
    """The planted outputs continue after the end: steps accept tokens that must be discarded."""
    free = expected.free
    with planted(free.prompts, free.outputs, VOCAB, miss=0.0):
        got = complete(llm, free.prompts, greedy(TOKENS, **EOS))
    assert differing(expected.ended, got) == []
    ended = [completion for completion in got if completion.finish_reason == "stop"]
    assert len(ended) >= 5 and {completion.stop_reason for completion in ended} <= set(STOPS)


def test_arrivals_and_aborts(llm: LLM, expected: Expected) -> None:
    """Requests arrive while others decode, and every fourth is aborted during decoding."""
    free = expected.free
    arrivals = [(3 * i, prompt, greedy(TOKENS)) for i, prompt in enumerate(free.prompts)]
    aborts = {i: 5 + i for i in range(0, len(arrivals), 4)}
    with planted(free.prompts, free.outputs, VOCAB), recorded_steps() as steps:
        got = drive(llm, arrivals, aborts)
    for i, completion in enumerate(free.completions):
        if i in aborts:
            tokens = got[i].token_ids
            assert aborts[i] <= len(tokens) < TOKENS
            assert tokens == completion.token_ids[: len(tokens)]
        else:
            assert got[i] == completion
    assert len({len(step) for step in steps}) > sized(4, 2) and len(mixed(steps)) > sized(10, 3)
    assert llm.reset_prefix_cache(), "a block is still in use"


def test_preemption(chaotic_llama: str, random_heads: str, expected: Expected) -> None:
    """Too few blocks for eight requests: some are preempted and restarted."""
    reference = expected.waiting
    assert_chaotic(reference.outputs)
    few = {"num_gpu_blocks_override": 24, "block_size": BLOCK, "max_num_seqs": 8}
    config = medusa(random_heads, "mc_sim_7b_63")
    with engine(chaotic_llama, config, max_model_len=320, **few) as llm:
        *_, moves = reference.planted_on(llm)
        assert metric(llm, "num_preemptions") >= 4
    assert sum(moves) > 0.7 * len(moves)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
def test_torch_compile(
    chaotic_llama: str, random_heads: str, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    graphs = counters["stats"]["unique_graphs"]
    with engine(chaotic_llama, medusa(random_heads, TREE), enforce_eager=False) as llm:
        *_, moves = expected.free.planted_on(llm)
        compilation = llm.llm_engine.vllm_config.compilation_config
    assert compilation.mode != CompilationMode.NONE and compilation.backend == "inductor"
    assert counters["stats"]["unique_graphs"] > graphs
    assert sum(moves) > 0.7 * len(moves)
