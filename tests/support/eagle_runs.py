"""A target with an EAGLE-3 drafter for its outputs, and runs of it on an engine.

Runs are compared with vLLM's own chain, and plant future tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from support.eagle import Eagle3, trained_drafter
from support.eagle_steps import assert_dense, recorded_trees
from support.engines import Prompt, complete, engine, greedy, metric, random_prompts
from support.models import STOPS, VOCAB, save_model
from support.planted import planted
from support.reference import differing
from support.runner import sized
from support.spies import mean_accepted, recorded_steps
from vllm_medusa.budget.policy import FixedBudget
from vllm_medusa.integration.drafters.eagle_trees import PendingTokens

LAYERS = (1, 2, 3)
PROMPT, TOKENS = 8, 32  # lengths of the texts that drafters learn


@dataclass
class Case:
    target: str
    model: Any
    drafter: Eagle3
    folder: str
    prompts: list[Prompt]  # whose greedy outputs the drafter memorized
    outputs: list[list[int]]


def learned_texts(
    folder: Path, architecture: str, **settings: Any
) -> tuple[str, Any, list[Prompt], torch.Tensor]:
    """Save a chaotic target; returns it twice, and prompts with their greedy outputs [N, T]."""
    target = save_model(folder / "target", architecture, eos_token_id=list(STOPS), **settings)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = random_prompts(12, VOCAB, shortest=PROMPT, longest=PROMPT)
    return target, model, prompts, greedy_texts(model, prompts)


def greedy_texts(model: Any, prompts: list[Prompt]) -> torch.Tensor:
    """Prompts of one length with their greedy outputs, int64 [N, T]."""
    return model.generate(
        torch.tensor(prompts), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )


def make_case(folder: Path) -> Case:
    target, model, prompts, texts = learned_texts(folder, "Llama", num_hidden_layers=4)
    made = folder / "drafter"
    drafter = trained_drafter(target, model, texts, PROMPT, LAYERS, made, draft_vocab=200, depth=2)
    return Case(target, model, drafter, str(made), prompts, texts[:, PROMPT:].tolist())


def eagle_config(case: Case, tree: Any, **options: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": case.folder, "tree": tree, **options}


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
def mixed_steps(case: Case, tree: dict[str, Any], **changes: Any) -> Iterator[LLM]:
    """Few blocks of 32, steps of 96 tokens: chunked prefill, preempted requests."""
    options: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": sized(40, 20),
        "max_model_len": 512,
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
    }
    with engine(case.target, tree, **options | changes) as llm:
        yield llm


def exact_in_mixed_steps(case: Case, llm: LLM, plain: Any, *, cached: bool = True) -> None:
    """Most prompt tokens are in the prefix cache if there is one, with the drafter's entries."""
    preempted, hits = metric(llm, "num_preemptions"), metric(llm, "prefix_cache_hits")
    assert run(case, llm, plain, every=sized(5, 3)) > 50
    assert metric(llm, "num_preemptions") > preempted
    assert (metric(llm, "prefix_cache_hits") > hits) == cached


def drafting_every_fifth_step(patch: pytest.MonkeyPatch) -> list[int]:
    """Every fifth step drafts. Returns, for each flush, the number of pending steps."""
    steps, waited = itertools.count(), []
    flush = PendingTokens.flush

    def counted(self: Any) -> Any:
        waited.append(len(self._steps))
        return flush(self)

    patch.setattr(PendingTokens, "flush", counted)
    patch.setattr(FixedBudget, "limit", lambda *_: 0 if next(steps) % 5 else 12)
    return waited


def exact_after_plain_steps(case: Case, llm: LLM, plain: Any, patch: pytest.MonkeyPatch) -> None:
    """Tokens of plain steps are processed later, but before anything reads their entries."""
    waited, preempted = drafting_every_fifth_step(patch), metric(llm, "num_preemptions")
    assert run(case, llm, plain, every=1) > 50
    assert metric(llm, "num_preemptions") > preempted
    assert max(waited) > 2


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
    case: Case, stock: dict[str, Any], ours: dict[str, Any], *, plant: bool = False, **options: Any
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
    from vllm_medusa.integration.v1.eagle_proposer import EagleModelRunner

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
    name = "_propose" if hasattr(owner, "_propose") else "propose_draft_token_ids"
    original = getattr(owner, name)

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
        patch.setattr(owner, name, propose)
        yield found
