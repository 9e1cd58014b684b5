"""Hydra heads in a real engine: plain vLLM's tokens, accepted step by step as by decode.py.

The heads know a chaotic target's outputs by heart, each token below the true path only: a head that
sees another branch, or no branch, is right about nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, random_prompts
from support.hydra import save_fitted_hydra
from support.models import VOCAB, save_model
from support.reference import assert_chaotic, differing
from support.runner import ON_V2, on_v1, sized
from support.spies import assert_told, mean_accepted, recorded_steps
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.heads import load_heads
from vllm_medusa.proposer.hydra import HydraStep
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.dynamic import BEAM_WIDTH, Beam, DynamicTree

pytestmark = pytest.mark.engine

HIDDEN, HEADS, NODES = 512, 4, 12
TOKENS, COUNT = sized(48, 24), sized(6, 2)
STATIC = TokenTree.dense([3, 2, 1, 1])
TREES: dict[str, tuple[dict[str, Any], TokenTree | DynamicTree]] = {
    "static": ({"tree": STATIC.to_lists()}, STATIC),
    "dynamic": (
        {"tree": None, "budget": NODES},
        DynamicTree(Beam(BEAM_WIDTH, BEAM_WIDTH, HEADS), NODES + 1),
    ),
}


@dataclass
class Fitted:
    """A chaotic target, heads that know its greedy outputs, the oracle's results by tree."""

    model: str
    heads: str
    prompts: list[list[int]]
    expected: dict[str, list[DecodeResult]]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("hydra")
    path = save_model(
        folder / "model", "Llama", hidden_size=HIDDEN, num_attention_heads=8, head_dim=64,
        num_key_value_heads=4, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_prompts(COUNT, VOCAB, longest=60, seed=5)
    states, paths = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS + HEADS + 1, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
            out = model(ids, output_hidden_states=True).hidden_states[-1][0]
            for end in range(len(prompt), len(prompt) + TOKENS):
                states.append(out[end - 1])  # its token is ids[end]
                paths.append(ids[0, end : end + HEADS + 1])
    embedding = model.get_input_embeddings().weight.detach()
    saved = save_fitted_hydra(folder / "heads", embedding, torch.stack(states), torch.stack(paths))
    heads: Any = load_heads(saved, hidden_size=HIDDEN, vocab_size=VOCAB)[0]
    heads.use_target_embedding(embedding)
    expected = {
        kind: [decode(model, heads, tree, torch.tensor(prompt), TOKENS) for prompt in prompts]
        for kind, (_, tree) in TREES.items()
    }
    assert_chaotic([result.token_ids for result in expected["static"]])
    return Fitted(path, saved, prompts, expected)


@pytest.fixture(scope="module", params=TREES)
def running(request: pytest.FixtureRequest, fitted: Fitted) -> Iterator[tuple[str, LLM]]:
    with engine(fitted.model, medusa(fitted.heads, **TREES[request.param][0])) as llm:
        yield request.param, llm


def test_accepts_what_the_oracle_accepts(running: tuple[str, LLM], fitted: Fitted) -> None:
    kind, llm = running
    with recorded_steps() as steps:
        got = complete(llm, fitted.prompts, greedy(TOKENS))
    assert_told(steps, fitted.prompts, got)
    for completion, result in zip(got, fitted.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert list(completion.accepted) == result.accepted_per_step
    assert mean_accepted(steps) > 0.8


@pytest.mark.skipif(ON_V2, reason="few prompts say nothing of a mean")
def test_a_siblings_token_costs_acceptance(
    running: tuple[str, LLM], fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: each node's head is shown its neighbour's token."""
    kind, llm = running
    expand = HydraStep.expand

    def wrong(self: HydraStep, level: int, tokens: Any, *args: Any) -> Any:
        return expand(self, level, tokens if level == 0 else tokens.roll(1, 1), *args)

    monkeypatch.setattr(HydraStep, "expand", wrong)
    with recorded_steps() as steps:
        got = complete(llm, fitted.prompts, greedy(TOKENS))
    for completion, result in zip(got, fitted.expected[kind], strict=True):
        assert list(completion.token_ids) == result.token_ids
    right = [n for result in fitted.expected[kind] for n in result.accepted_per_step]
    assert mean_accepted(steps) < 0.93 * sum(right) / len(right)


@pytest.mark.skipif(ON_V2, reason="plain V2 is compared in tests/v2")
def test_seeded_samples_are_plain_vllms(running: tuple[str, LLM], fitted: Fitted) -> None:
    params = [
        SamplingParams(temperature=0.4, seed=seed, max_tokens=TOKENS, ignore_eos=True)
        for seed in range(len(fitted.prompts))
    ]
    got = complete(running[1], fitted.prompts, params)
    plain = _plain(fitted, params)
    assert differing(plain, got) == []


_seen: list[Any] = []


def _plain(fitted: Fitted, params: list[SamplingParams]) -> list[Any]:
    if not _seen:
        with on_v1(), engine(fitted.model) as llm:
            _seen.extend(complete(llm, fitted.prompts, params))
    return _seen
