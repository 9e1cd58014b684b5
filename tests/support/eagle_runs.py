"""Runs of a `Case` on an engine: against vLLM's own chain, and with planted future tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from support.eagle_case import TOKENS, Case
from support.eagle_steps import assert_dense, recorded_trees
from support.engines import complete, engine, greedy, metric, random_prompts
from support.models import VOCAB
from support.planted import planted
from support.reference import differing
from support.runner import sized
from support.spies import mean_accepted, recorded_steps

# Shared prefixes for the prefix cache, and prompts longer than a step.
LONG = [
    [*shared, *own]
    for shared in random_prompts(2, VOCAB, shortest=97, longest=110, seed=5)
    for own in random_prompts(sized(6, 3), VOCAB, shortest=1, longest=40, seed=6)
]
PARAMS = [
    greedy(TOKENS) if i % 2 else greedy(TOKENS, temperature=0.9, seed=i) for i in range(len(LONG))
]


@contextmanager
def mixed_steps(case: Case, tree: dict[str, Any]) -> Iterator[LLM]:
    """Few blocks of 32, steps of 96 tokens: chunked prefill, preempted requests."""
    with engine(
        case.target,
        tree,
        block_size=32,
        num_gpu_blocks_override=sized(40, 20),
        max_model_len=512,
        max_num_batched_tokens=96,
        enable_prefix_caching=True,
    ) as llm:
        yield llm


def exact_in_mixed_steps(case: Case, llm: LLM, plain: Any) -> None:
    """Most prompt tokens are in the prefix cache, with the drafter's entries."""
    preempted, hits = metric(llm, "num_preemptions"), metric(llm, "prefix_cache_hits")
    assert run(case, llm, plain, every=sized(5, 3)) > 50
    assert metric(llm, "num_preemptions") > preempted
    assert metric(llm, "prefix_cache_hits") > hits


def run(case: Case, llm: LLM, plain: Any, every: int, some: slice = slice(None)) -> int:
    """Plant future tokens on the drafter's trees; returns the number of nodes compared."""
    prompts, expected = LONG[some], plain[some]
    outputs = [list(completion.token_ids) for completion in expected]
    with (
        planted(prompts, outputs, VOCAB),
        recorded_steps() as steps,
        recorded_trees(every) as trees,
    ):
        got = complete(llm, prompts, PARAMS[some])
    assert differing(expected, got) == []
    checked = sum(assert_dense(grown, case.drafter, case.model) for grown in trees)
    assert mean_accepted(steps) > 1
    return checked


def assert_chain_of_vllm(
    case: Case,
    stock: dict[str, Any],
    ours: dict[str, Any],
    *,
    plant: bool = False,
    **options: Any,
) -> None:
    """Token for token, drafts included, in an all-greedy batch, with chains of 3.

    Args:
        case: With the outputs for the prompts.
        stock: vLLM's own options.
        ours: Options with a chain.
        plant: Verify two future tokens and a wrong one instead of the drafts, for drafters that
            do not predict the outputs.
        **options: Of both engines.

    """
    from vllm_medusa.integration.v1.eagle import EagleModelRunner

    chain = {"num_speculative_tokens": 3}
    future = {tuple(p): out for p, out in zip(case.prompts, case.outputs, strict=True)}
    AttentionBackendEnum.CPU_ATTN.clear_override()
    after_sampling = chain | {"disable_padded_drafter_batch": True}  # drafts know the output
    with (
        _drafts_of(GPUModelRunner, future if plant else {}) as theirs,
        engine(case.target, stock | after_sampling, **options) as llm,
    ):
        expected = complete(llm, case.prompts, greedy(TOKENS))
    with (
        _drafts_of(EagleModelRunner, future if plant else {}) as mine,
        recorded_steps() as steps,
        engine(case.target, ours | chain, **options) as llm,
    ):
        got = complete(llm, case.prompts, greedy(TOKENS))
    assert differing(expected, got) == []
    assert [list(completion.token_ids) for completion in got] == case.outputs
    for prompt, rows in mine.items():
        pairs = list(zip(rows, theirs[prompt], strict=True))
        assert all(row == their[: len(row)] for row, their in pairs)
        assert sum(len(row) == 3 for row, _ in pairs) > TOKENS // 4 - 3
    assert mean_accepted(steps) > 1


Drafts = dict[tuple[int, ...], list[list[int]]]


@contextmanager
def _drafts_of(owner: type, future: dict[tuple[int, ...], list[int]]) -> Iterator[Drafts]:
    """Record a runner's drafts for each prompt, step by step; then replace those with a future."""
    found: Drafts = {}
    original = owner.propose_draft_token_ids  # type: ignore[attr-defined]

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, *args, **kwargs)
        rows = drafts if isinstance(drafts, list) else drafts.tolist()
        for place, req_id in enumerate(self.input_batch.req_ids):
            request, row = self.requests[req_id], rows[place]
            prompt = tuple(request.prompt_token_ids)
            found.setdefault(prompt, []).append(row)
            if prompt in future:
                known = future[prompt][len(request.output_token_ids) :][:2]
                rows[place] = [*known, 3, 3, 3][: len(row)]
        return rows if isinstance(drafts, list) else torch.tensor(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "propose_draft_token_ids", propose)
        yield found
