"""The engine accepts, step by step, the same drafts as decode.py: same heads, prompts and tree.

decode.py is batch 1 over transformers; the engine runs all prompts together over a paged cache.
They share only the algorithm, so a draft from the wrong hidden state, which a comparison with plain
decoding can't detect, is found here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.assets import HEADS as TRAINED_HEADS
from support.assets import TARGET, code_prompts, trained_model
from support.engines import Completion, complete, engine, greedy, medusa
from support.fitted_case import KNOWN, TOKENS, TREES, Fitted
from support.models import VOCAB
from support.reference import differing
from support.runner import ON_V2, sized
from support.spies import accepted_per_step, assert_reported, mean_accepted, recorded_steps
from vllm import LLM, SamplingParams

from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.heads.checkpoint import peek_heads
from vllm_medusa.integration.drafters.medusa_drafter import MedusaDrafter
from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.proposer.hydra import HydraBeam
from vllm_medusa.proposer.steps import HydraStep
from vllm_medusa.sampler import Verdict
from vllm_medusa.tree import TokenTree, load_preset

pytestmark = pytest.mark.engine

Running = tuple[str, LLM]
Patch = pytest.MonkeyPatch


def assert_agreement(
    llm: LLM, prompts: list[list[int]], expected: list[DecodeResult], tokens: int = TOKENS
) -> float:
    """Same tokens, same accepted drafts in every step and in the metrics; returns their mean."""
    with recorded_steps() as steps:
        got = complete(llm, prompts, greedy(tokens))
    assert_reported(steps, prompts, got)
    for completion, result in zip(got, expected, strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert list(completion.accepted) == result.accepted_per_step
    return mean_accepted(steps)


def params(case: Fitted) -> list[SamplingParams]:
    return [greedy(TOKENS, temperature=0.4, seed=seed) for seed in range(len(case.prompts))]


@pytest.fixture(scope="module")
def plain(fitted_case: Fitted) -> list[Completion]:
    """Plain vLLM's samples; V2's are compared in tests/v2."""
    if ON_V2:
        return []
    with engine(fitted_case.model) as llm:
        return complete(llm, fitted_case.prompts, params(fitted_case))


@pytest.fixture(scope="module", params=sized(list(TREES), ["medusa"]))
def running(
    request: pytest.FixtureRequest, plain: object, fitted_case: Fitted
) -> Iterator[Running]:
    kind = request.param
    with engine(fitted_case.model, medusa(fitted_case.heads[kind], **TREES[kind][0])) as llm:
        yield kind, llm


def test_accepts_what_the_oracle_accepts(running: Running, fitted_case: Fitted) -> None:
    kind, llm = running
    expected = fitted_case.expected[kind]
    assert_agreement(llm, fitted_case.prompts, expected)
    accepted = [n for result in expected for n in result.accepted_per_step]
    assert sum(accepted) > 0.8 * len(accepted) and len(set(accepted)) > 3


def test_seeded_samples_are_plain_vllms(
    running: Running, plain: list[Completion], fitted_case: Fitted
) -> None:
    got = complete(running[1], fitted_case.prompts, params(fitted_case))
    assert differing(plain, got) == []


def acceptance(running: Running, case: Fitted) -> tuple[float, float]:
    """Mean accepted drafts of a broken drafter, and the oracle's.

    Tokens stay correct; the steps of every prompt differ from the oracle's.
    """
    kind, llm = running
    with recorded_steps() as steps:
        got = complete(llm, case.prompts, greedy(TOKENS))
    right = []
    for prompt, completion, result in zip(case.prompts, got, case.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert accepted_per_step(steps, prompt) != result.accepted_per_step
        right += result.accepted_per_step
    return mean_accepted(steps), sum(right) / len(right)


def by_count(verdict: Verdict) -> Verdict:
    """The row of the last accepted node if the tree were a chain."""
    return replace(verdict, path=replace(verdict.path, last_node=verdict.path.num_accepted))


def at_root(verdict: Verdict) -> Verdict:
    path = verdict.path
    return replace(verdict, path=replace(path, last_node=torch.zeros_like(path.last_node)))


@pytest.mark.parametrize("wrong", [by_count, at_root], ids=lambda wrong: wrong.__name__)
def test_hidden_state_of_the_wrong_node(
    running: Running, fitted_case: Fitted, monkeypatch: Patch, wrong: Callable[[Verdict], Verdict]
) -> None:
    """A negative control: tokens stay equal, acceptance drops."""
    end = RequestTrees.end

    def drafting(self: RequestTrees) -> Any:
        if self.verdict is not None:
            self.verdict = wrong(self.verdict)
        return end(self)

    monkeypatch.setattr(RequestTrees, "end", drafting)
    found, right = acceptance(running, fitted_case)
    assert found < 0.85 * right


def test_another_map_costs_acceptance(
    running: Running, fitted_case: Fitted, monkeypatch: Patch
) -> None:
    """A negative control: the rows belong to tokens other than those in the map."""
    if running[0] == "medusa":
        pytest.skip("static trees of Medusa heads are filled in one call")
    read, draft, asked = MedusaDrafter._read, HydraBeam.draft, []

    def wrong(self: MedusaDrafter, logits: Any, *args: Any) -> Any:
        asked.append(logits.shape[-1])
        return read(self, logits.roll(1, -1), *args)

    def wrong_beam(self: HydraBeam, *args: Any) -> Any:
        assert self.token_map is not None
        asked.append(len(self.token_map))
        kept = self.token_map.clone()
        self.token_map.copy_(kept.roll(1))
        found = draft(self, *args)
        self.token_map.copy_(kept)
        return found

    monkeypatch.setattr(MedusaDrafter, "_read", wrong)
    monkeypatch.setattr(HydraBeam, "draft", wrong_beam)
    assert acceptance(running, fitted_case)[0] < 0.2
    assert set(asked) == {KNOWN if running[0] == "dynamic hydra" else VOCAB}


def test_a_siblings_token_costs_acceptance(
    running: Running, fitted_case: Fitted, monkeypatch: Patch
) -> None:
    """A negative control: heads read a sibling's token, or in a beam any other token."""
    if running[0] == "medusa":
        pytest.skip("Medusa heads see no token")
    expand, draft = HydraStep.expand, HydraBeam.draft

    def wrong(self: HydraStep, level: int, tokens: Any, *args: Any) -> Any:
        return expand(self, level, tokens if level == 0 else tokens.roll(1, 1), *args)

    def wrong_beam(self: HydraBeam, states: Any, root: Any, *args: Any) -> Any:
        used = self._hydra.embedding
        kept, where = self._weights._kept, used.weight
        (right,) = (each for each in kept if getattr(each, "data_ptr", int)() == where)
        other = right.roll(1, 0)
        other[root] = right[root]
        used.weight = other.data_ptr()
        found = draft(self, states, root, *args)
        used.weight = where
        return found

    monkeypatch.setattr(HydraStep, "expand", wrong)
    monkeypatch.setattr(HydraBeam, "draft", wrong_beam)
    found, right = acceptance(running, fitted_case)
    assert found < 0.93 * right


def full_checkpoint(folder: Path) -> str:
    """The target with the heads in its own checkpoint, in the reference's names."""
    full = shutil.copytree(TARGET, folder / "full")
    weights = load_file(full / "model.safetensors")
    lm_head, num_layers = weights["model.embed_tokens.weight"], peek_heads(TRAINED_HEADS).num_layers
    for name, tensor in load_file(f"{TRAINED_HEADS}/model.safetensors").items():
        _, head, _, layer, kind = name.split(".")
        weights[f"medusa_head.{head}.{layer}.linear.{kind}"] = tensor
        weights[f"medusa_head.{head}.{num_layers}.weight"] = lm_head.clone()  # tied
    save_file(weights, full / "model.safetensors", {"format": "pt"})
    return str(full)


@pytest.mark.parametrize("case", ["own", "mc_sim_7b_63", "full checkpoint"])
def test_trained_model(case: str, tmp_path: Path) -> None:
    """Trained heads on real prompts, in fp32; a full Medusa-2 checkpoint needs no ``model``."""
    own = peek_heads(TRAINED_HEADS).tree
    assert own is not None
    topology = load_preset(case) if case == "mc_sim_7b_63" else TokenTree.from_paths(own)
    prompts = code_prompts(0, 12)
    model, heads = trained_model()
    expected = [decode(model, heads, topology, torch.tensor(prompt), 64) for prompt in prompts]
    target, config = TARGET, medusa(TRAINED_HEADS, topology.to_lists())
    if case == "full checkpoint":
        target = full_checkpoint(tmp_path)
        del config["model"]
    with engine(target, config) as llm:
        assert assert_agreement(llm, prompts, expected, 64) > 0.5
