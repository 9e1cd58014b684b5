"""The same requests on both runners, one after the other: tokens, acceptances, metrics.

Trained heads on real prompts, without planting, temperature 0 (seeds give other tokens on V2). Runs
in `test_steps_on_v2`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from support.assets import HEADS, TARGET, code_prompts, tokenizer
from support.engines import Completion, complete, engine, greedy, medusa
from support.metrics import Counts, counts
from support.runner import ON_V2, async_scheduling, on_v1
from vllm import SamplingParams

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ON_V2, reason="runs in a process of tests/v2/test_steps_on_v2.py"),
]

TREE = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
DYNAMIC = {"method": "medusa", "model": HEADS, "budget": 7}
Results = tuple[list[Completion], list[list[tuple[int, ...]]], Counts]


# (engine options, async scheduling, metrics left out)
KINDS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "chunks": ({"max_num_batched_tokens": 22, "max_num_seqs": 4}, False, ()),
    "dynamic": ({"config": DYNAMIC}, False, ()),
    "async": ({}, True, ("iteration_tokens", "prefix_cache")),  # scheduled a step ahead
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """All kinds of ends; some prompts are chunked and mixed with trees, one is repeated."""
    prompts = [prompt[:36] for prompt in code_prompts(0, 4)]
    ends = tokenizer().convert_tokens_to_ids(["Ċ", "(", ")", ".", ",", "="])
    params = [
        greedy(14),
        greedy(1),
        greedy(14, stop_token_ids=ends, min_tokens=3),
        greedy(9, repetition_penalty=1.2),
        greedy(14, extra_args={"medusa": {"max_draft_tokens": 2}}),
    ]
    return [*prompts, prompts[0]], params


def results(config: Any = None, **options: Any) -> Results:
    """All outputs of an engine for the requests, without times."""
    prompts, params = requests()
    options = {"enable_prefix_caching": True, "block_size": 32, **options}
    with engine(TARGET, config or medusa(HEADS, TREE), **options) as llm:
        got = complete(llm, prompts, params)
        got += complete(llm, prompts[:1], greedy(6))  # its prompt is cached
        return got, [[each.drafted, each.accepted] for each in got], counts(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_acceptances_and_metrics(kind: str) -> None:
    options, ahead, left_out = KINDS[kind]
    with on_v1():
        completions, steps, metrics = results(**options)
    with async_scheduling() if ahead else nullcontext():
        got, got_steps, got_metrics = results(**options)
    assert got == completions and got_steps == steps
    assert kept(got_metrics, left_out) == kept(metrics, left_out)
    assert {completion.finish_reason for completion in got} == {"length", "stop"}
    assert metrics["spec_decode_num_accepted_tokens"] > 10 and metrics["prefix_cache_hits"] >= 32


def kept(metrics: Counts, left_out: tuple[str, ...]) -> Counts:
    return {name: value for name, value in metrics.items() if not name.startswith(left_out)}
