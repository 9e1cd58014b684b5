"""Grammars through the scheduler, with a worker that takes the first token that a mask allows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
from support.assets import HEADS, TARGET, tokenizer
from support.schedulers import new_scheduler
from vllm import envs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_medusa.budget.acceptance import Drafted
from vllm_medusa.budget.policy import Auto
from vllm_medusa.worker.drafts import TreeDrafts, tree_parents
from vllm_medusa.worker.grammar import Candidates, allows
from vllm_medusa.worker.scheduler import TreeScheduler

WORDS = "return self, positive or negative"


@pytest.fixture
def scheduler(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> TreeScheduler:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    envs.disable_envs_cache()
    return new_scheduler(TARGET, {"method": "medusa", "model": HEADS, "budget": "auto"})


class Worker:
    """Walks each request's tree as long as tokens and masks agree."""

    def __init__(self, scheduler: TreeScheduler) -> None:
        self.scheduler = scheduler
        self.accepted: list[int] = []
        self.texts: dict[str, list[int]] = {}

    def step(self, *, drafts: bool) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        masks = scheduler.get_grammar_bitmask(plan)
        sampled, start = [], 0
        for name in names:
            tokens = plan.scheduled_spec_decode_tokens.get(name, [])
            assert masks is not None and name in masks.structured_output_request_ids
            rows = masks.grammar_bitmask[start : start + 1 + len(tokens)]
            start += len(rows)
            sampled.append(self.walk(tokens, tree_parents(plan).get(name, []), rows))
            self.texts.setdefault(name, []).extend(sampled[-1])
        index = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(plan, ModelRunnerOutput(names, index, sampled))
        here = [name for name in names if name in scheduler.requests]
        guesses = Candidates([5, 6, 7], [0, 0, 1], [0.5, 0.4, 0.3])
        candidates = dict.fromkeys(here, guesses) if drafts else {}
        empty: list[Any] = [[] for _ in here]
        scheduler.update_draft_token_ids(TreeDrafts(here, empty, list(empty), candidates))

    def walk(self, tokens: list[int], parents: list[int], rows: np.ndarray) -> list[int]:
        assert len(parents) == len(tokens)
        path, node = [], 0
        while True:
            mask = rows[node]
            children = [n for n, parent in enumerate(parents, 1) if parent == node]
            child = next((n for n in children if allows(mask, tokens[n - 1])), None)
            if child is None:
                path.append(next(t for t in range(32 * len(mask)) if allows(mask, t)))
                break
            path.append(tokens[child - 1])
            node = child
            if path[-1] == tokenizer().eos_token_id:
                break
        self.accepted.append(len(path) - 1)
        return path


@pytest.mark.parametrize("drafts", ["always", "never", "in turn"])
def test_every_request_follows_its_grammar(scheduler: TreeScheduler, drafts: str) -> None:
    """Whether heads drafted or not, tokens forced by grammars are drafted and accepted."""
    policy: Any = scheduler.policy
    assert isinstance(policy, Auto) and scheduler.drafts_forced

    def everything(drafts: list[Drafted], requests: int, room: int) -> list[int]:
        for draft in drafts:
            assert list(draft.survival) == sorted(draft.survival, reverse=True)
            assert draft.kind == 2  # greedy, with a grammar
            assert draft.copied is not None and len(draft.copied) == len(draft.survival)
        return [len(draft.survival) for draft in drafts]

    policy.counts = everything
    policy._plan = policy.plan(1, 9)
    object.__setattr__(policy._plan, "forced_pay", True)
    policy.plan = lambda *_: policy._plan
    worker = Worker(scheduler)
    for name, regex in (("a", WORDS), ("b", "(yes|no) " + WORDS)):
        params = SamplingParams(
            max_tokens=60, temperature=0.0, structured_outputs=StructuredOutputsParams(regex=regex)
        )
        params.structured_outputs._backend = "xgrammar"  # type: ignore[union-attr]
        params.update_from_generation_config({}, tokenizer().eos_token_id)
        request = Request(name, [3, 4, 5], params, None)
        scheduler.structured_output_manager.grammar_init(request)
        structured: Any = request.structured_output_request
        structured._grammar.result(timeout=30)  # compiled in the background
        scheduler.add_request(request)
    turns = itertools.cycle({"always": [True], "never": [False]}.get(drafts, [True, False]))
    for _ in range(100):
        if not scheduler.has_unfinished_requests():
            break
        if scheduler.running or scheduler.waiting:
            worker.step(drafts=next(turns))
    texts = {name: tokenizer().decode(tokens) for name, tokens in worker.texts.items()}
    assert texts["a"].removesuffix("</s>") == WORDS
    assert texts["b"].removesuffix("</s>").split(" ", 1)[1] == WORDS
    assert np.mean(worker.accepted) > 0.5
    assert policy.acceptance.copies
