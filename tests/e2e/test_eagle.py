"""EAGLE-3 with trees: exact KV, a chain equal to vLLM's, and plain vLLM's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.budgets import scheduler_of
from support.eagle import Eagle1
from support.eagle_runs import (
    LAYERS,
    LONG,
    PARAMS,
    Case,
    assert_chain_of_vllm,
    drafting_every_fifth_step,
    eagle_config,
    exact_after_plain_steps,
    exact_in_mixed_steps,
    mixed_steps,
    run,
)
from support.eagle_steps import assert_dense, recorded_trees, torch_only
from support.engines import complete, engine, generate, greedy, metric
from support.models import VOCAB
from support.planted import PlantedCopies, planted
from support.reference import differing
from support.spies import mean_accepted, recorded_steps, tree_rows
from vllm import LLM

from vllm_medusa.integration.attention import cpu_attention
from vllm_medusa.integration.drafters.eagle_trees import EagleTrees, PendingTokens
from vllm_medusa.integration.v1.eagle_proposer import EagleModelRunner
from vllm_medusa.integration.v1.runner import MedusaModelRunner
from vllm_medusa.lookup.lookup import Lookup

pytestmark = pytest.mark.engine

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def case(eagle_case: Case) -> Case:
    return eagle_case


def test_chain_is_that_of_vllm(case: Case) -> None:
    """The drafter is as saved by `train`: vLLM's own loader reads it."""
    stock = {"method": "eagle3", "model": case.folder}
    assert_chain_of_vllm(case, stock, eagle_config(case, "chain"))


DEPTH, BLOCK = 4, 32


@pytest.fixture(scope="module")
def plain(case: Case) -> Any:
    with engine(case.target) as llm:
        return complete(llm, LONG, PARAMS)


def test_eagle_1(case: Case, plain: Any) -> None:
    """EAGLE-1 reads the last hidden state and uses the target's LM head; it is not trained here.

    Runs before `llm`, because only one engine can exist at a time.
    """
    torch.manual_seed(1)
    drafter = Eagle1(case.model)
    folder = Path(case.folder).with_name("eagle-1")
    config = eagle_config(case, {"width": 3, "depth": 3}, budget=8)
    config |= {"method": "eagle", "model": drafter.save(folder)}
    with engine(case.target, config, block_size=32, enable_prefix_caching=True) as llm:
        one = Case(case.target, case.model, drafter, str(folder), [], [])
        assert run(one, llm, plain, every=4, some=slice(6)) > 20


@pytest.fixture(scope="module")
def llm(case: Case, plain: Any) -> Iterator[LLM]:
    """With lookup, which finds nothing to copy in chaotic texts."""
    tree = eagle_config(case, {"width": 3, "depth": DEPTH}, budget=12, lookup=True)
    with mixed_steps(case, tree) as llm:
        yield llm


def test_exact_in_mixed_steps(case: Case, llm: LLM, plain: Any) -> None:
    exact_in_mixed_steps(case, llm, plain)


def test_exact_after_plain_steps(case: Case, llm: LLM, plain: Any, monkeypatch: Patch) -> None:
    exact_after_plain_steps(case, llm, plain, monkeypatch)


def test_the_kernel_drafts_what_torch_drafts(
    case: Case, llm: LLM, plain: Any, monkeypatch: Patch
) -> None:
    """From the same states, with this engine's cache; torch writes the same entries again."""
    draft, states_of = EagleTrees.draft, EagleModelRunner._draft_states
    on_host = EagleTrees.prefill_on_host
    nodes, served = [], []

    def drafting(self: EagleTrees, *args: Any, **kwargs: Any) -> Any:
        found = draft(self, *args, **kwargs)
        with torch_only(self):
            wanted = draft(self, *args, **kwargs)
        possible = wanted.log_survival.isfinite()
        assert torch.equal(found.log_survival.isfinite(), possible)
        torch.testing.assert_close(found.log_survival, wanted.log_survival, atol=1e-3, rtol=1e-3)
        same = (found.token_ids == wanted.token_ids)[possible]
        nodes.append((int(same.sum()), len(same)))
        return found

    def prefilling(self: EagleTrees, rows: Any, path: Any, *args: Any) -> Any:
        found = on_host(self, rows, path, *args)
        served.append(path is not None and found is not None)
        return found

    def drafting_from(self: EagleModelRunner, *args: Any) -> Any:
        found = states_of(self, *args)
        if found is None:
            return None
        with torch_only(self.drafter):
            wanted = states_of(self, *args)
        torch.testing.assert_close(found.normed, wanted.normed, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.hidden, wanted.hidden, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.ends, wanted.ends) and found.longest == wanted.longest
        return found

    monkeypatch.setattr(EagleTrees, "draft", drafting)
    monkeypatch.setattr(EagleTrees, "prefill_on_host", prefilling)
    monkeypatch.setattr(EagleModelRunner, "_draft_states", drafting_from)
    some = slice(0, 3)
    assert differing(plain[some], complete(llm, LONG[some], PARAMS[some])) == []
    same, count = map(sum, zip(*nodes, strict=True))
    assert same > 0.99 * count > 100  # near-ties may be in another order
    assert sum(served) > 5  # accepted paths


def test_later_requests_reuse_entries_of_plain_steps(
    case: Case, llm: LLM, plain: Any, monkeypatch: Patch
) -> None:
    """The entries are in the prefix cache, for requests at other places in the batch."""
    drafting_every_fifth_step(monkeypatch)
    hits = metric(llm, "prefix_cache_hits")
    texts = [(p, list(c.token_ids)) for p, c in zip(LONG, plain, strict=True)][1::2]
    cuts = [(BLOCK + 2 - len(p)) % BLOCK or 1 for p, _ in texts]  # after the end of a block
    first = [greedy(cut) for cut in cuts]
    got = complete(llm, [p for p, _ in texts], first)
    assert [list(c.token_ids) for c in got] == [
        out[:cut] for (_, out), cut in zip(texts, cuts, strict=True)
    ]
    pairs = list(zip(texts, cuts, strict=True))[::-1]
    prompts = [[*p, *out[:cut]] for (p, out), cut in pairs]
    outputs = [out[cut:] for (_, out), cut in pairs]
    with planted(prompts, outputs, VOCAB), recorded_trees(1) as trees:
        got = complete(llm, prompts, [greedy(len(out)) for out in outputs])
    assert [list(c.token_ids) for c in got] == outputs
    assert sum(assert_dense(grown, case.drafter, case.model) for grown in trees) > 5
    assert metric(llm, "prefix_cache_hits") > hits


def test_prefix_hits_are_as_long_as_without_a_drafter(case: Case, llm: LLM, plain: Any) -> None:
    """Also where the cached block's last entry was computed with another next token."""
    prompt = LONG[1]
    llm.reset_prefix_cache()
    complete(llm, [[*prompt[: 3 * BLOCK], prompt[3 * BLOCK] ^ 1]], greedy(1))
    with planted([prompt], [list(plain[1].token_ids)], VOCAB), recorded_steps() as steps:
        (got,) = generate(llm, [prompt], PARAMS[1])
    assert got.num_cached_tokens == 3 * BLOCK
    assert tuple(got.outputs[0].token_ids) == plain[1].token_ids
    assert mean_accepted(steps) > 1


def lost_steps(patch: Patch, llm: LLM) -> None:
    """Only the last step's tokens are processed after steps without drafts."""
    drafting_every_fifth_step(patch)
    patch.setattr(Lookup, "extend", lambda *args: args[5])  # with copies, few steps are plain
    flush = PendingTokens.flush

    def wrong(self: Any) -> Any:
        self._steps = self._steps[-1:]
        return flush(self)

    patch.setattr(PendingTokens, "flush", wrong)


def prompts_not_entered(patch: Patch, llm: LLM) -> None:
    """The entries of prompts, which are written without attention, are missing."""
    assert llm.reset_prefix_cache()
    patch.setattr(EagleTrees, "enter", lambda *_: None)


def entries_lost(patch: Patch, lose: Callable[[torch.Tensor], None]) -> None:
    """Entries of requests' paths are not written where ``lose`` sets their slots to -1."""
    prefill = EagleTrees.prefill

    def wrong(self: Any, paths: Any, **kwargs: bool) -> Any:
        starts = paths.common.query_start_loc_cpu.tolist()
        for start, end in pairwise(starts):
            lose(paths.common.slot_mapping[start:end])
        return prefill(self, paths, **kwargs)

    patch.setattr(EagleTrees, "prefill", wrong)
    patch.setattr(EagleTrees, "prefill_on_host", lambda *_: None)


def entries_kept(patch: Patch, llm: LLM) -> None:
    """Accepted paths keep the entries from drafting; only the last token's is recomputed."""

    def lose(slots: torch.Tensor) -> None:
        if len(slots) <= 5:
            slots[: int((slots >= 0).sum()) - 1] = -1

    entries_lost(patch, lose)


def siblings_seen(patch: Patch, llm: LLM) -> None:
    """A branch attends to all expanded nodes."""
    build = cpu_attention.plan_branches
    patch.setattr(
        cpu_attention, "plan_branches", lambda seen, *args: build(torch.ones_like(seen), *args)
    )


def other_layers(patch: Patch, llm: LLM) -> None:
    """The hidden states are those of the next layer."""
    wrong = tuple(layer + 1 for layer in LAYERS)
    llm.apply_model(lambda model: model.set_aux_hidden_state_layers(wrong))


def vocabulary_ignored(patch: Patch, llm: LLM) -> None:
    """Draft ids are used as target ids."""
    choices = EagleTrees.choices

    def wrong(self: Any, *args: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(self, "target_ids", None)
            return choices(self, *args)

    patch.setattr(EagleTrees, "choices", wrong)


def noise_left_out(patch: Patch, llm: LLM) -> None:
    """Drafts for sampled tokens do not share their noise."""
    patch.setattr(MedusaModelRunner, "_stream", lambda *_: None)


@pytest.mark.parametrize(
    "breaks",
    [lost_steps, prompts_not_entered, entries_kept, siblings_seen, other_layers,
     vocabulary_ignored, noise_left_out],
)  # fmt: skip
def test_negative_controls(
    case: Case, llm: LLM, plain: Any, monkeypatch: Patch, breaks: Callable[[Patch, LLM], None]
) -> None:
    """Tokens are correct for any drafter output, but entries or drafts are wrong."""
    with monkeypatch.context() as patch:
        breaks(patch, llm)
        with pytest.raises(AssertionError, match=r"not (close|equal)"):
            run(case, llm, plain, every=1, some=slice(3))
    assert llm.reset_prefix_cache()
    if breaks is other_layers:
        llm.apply_model(lambda model: model.set_aux_hidden_state_layers(LAYERS))


def run_copying(case: Case, llm: LLM, plain: Any, patch: Patch, shift: int = 0) -> list[int]:
    """Let lookup find the future tokens of half of the prompts; return accepted drafts per tree."""
    some = slice(0, None, 2)
    prompts, expected = LONG[some], plain[some]
    texts = [[*p, *c.token_ids] for p, c in zip(prompts, expected, strict=True)]
    PlantedCopies(texts, shift).plant(patch)
    patch.setattr(scheduler_of(llm), "_free_slots", lambda: 1 << 20)  # few blocks
    with recorded_steps() as steps, recorded_trees(every=1 + 8 * shift) as trees:
        got = complete(llm, prompts, PARAMS[some])
    assert differing(expected, got) == []
    assert sum(assert_dense(grown, case.drafter, case.model) for grown in trees) > 20
    return [row.accepted for row in tree_rows(steps)]


def test_copies_are_deeper_than_its_levels(
    case: Case, llm: LLM, plain: Any, monkeypatch: Patch
) -> None:
    """Accepted copies are processed like other drafts; if off by one token, few are accepted."""
    before = metric(llm, "lookup_accepted_tokens")
    with monkeypatch.context() as patch:
        accepted = run_copying(case, llm, plain, patch)
    assert max(accepted) > 2 * DEPTH and np.mean(accepted) > 2
    assert metric(llm, "lookup_accepted_tokens") - before > sum(accepted) // 2
    with monkeypatch.context() as patch:
        wrong = run_copying(case, llm, plain, patch, shift=1)
    assert np.mean(wrong) < 0.5 * np.mean(accepted)


def test_skipped_copies_are_detected(case: Case, llm: LLM, plain: Any, monkeypatch: Patch) -> None:
    """No entries are created for accepted tokens deeper than the drafter's levels."""

    def lose(slots: torch.Tensor) -> None:
        if DEPTH + 1 < len(slots) <= 13:
            slots[DEPTH + 1 :] = -1

    entries_lost(monkeypatch, lose)
    with pytest.raises(AssertionError, match="not close"):
        run_copying(case, llm, plain, monkeypatch)
