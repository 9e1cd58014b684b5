"""The engine accepts, step by step, the same drafts as decode.py: same heads, prompts and tree.

decode.py is batch 1 over transformers; the engine runs all prompts together over a paged cache.
They only share the algorithm, so a draft from the wrong hidden state, which equality with plain
decoding can't detect, shows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.assets import HEADS as TRAINED_HEADS
from support.assets import TARGET, code_prompts
from support.engines import complete, engine, greedy, medusa, random_prompts
from support.models import VOCAB, save_fitted_heads, save_model
from support.reference import assert_chaotic
from support.runner import sized
from support.spies import accepted_per_step, assert_told, mean_accepted, recorded_steps
from transformers import AutoModelForCausalLM
from vllm import LLM

from vllm_medusa.decode import DecodeResult, decode
from vllm_medusa.heads import load_heads, peek_heads
from vllm_medusa.sampler import Verdict
from vllm_medusa.tree import TokenTree, load_preset

pytestmark = pytest.mark.engine

HIDDEN = 512  # more than the states that the heads memorize: 8 prompts of TOKENS
TOKENS = sized(48, 24)
COUNT = sized(8, 3)
HEADS = 4
TREE = TokenTree.dense([3, 3, 2, 2])
Prompts = list[list[int]]


def oracle(
    model: Any, heads_path: str, tree: TokenTree, prompts: Prompts, tokens: int
) -> list[DecodeResult]:
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    heads, _ = load_heads(heads_path, hidden_size=hidden, vocab_size=vocab, dtype=torch.float32)
    return [decode(model, heads, tree, torch.tensor(prompt), tokens) for prompt in prompts]


def assert_agreement(
    llm: LLM, prompts: Prompts, expected: list[DecodeResult], tokens: int
) -> float:
    """Same tokens, same accepted drafts in every step and in the metrics; returns their mean."""
    with recorded_steps() as steps:
        got = complete(llm, prompts, greedy(tokens))
    assert_told(steps, prompts, got)
    for completion, result in zip(got, expected, strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert list(completion.accepted) == result.accepted_per_step
    return mean_accepted(steps)


@dataclass
class Fitted:
    """A chaotic target, heads that memorized its greedy outputs, and the oracle's results."""

    model: str
    heads: str
    prompts: Prompts
    expected: list[DecodeResult]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("fitted")
    path = save_model(
        folder / "model", "Llama", hidden_size=HIDDEN, num_attention_heads=8, head_dim=64,
        num_key_value_heads=4, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = random_prompts(COUNT, VOCAB, longest=sized(200, 60), seed=5)
    states, futures = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS + HEADS + 1, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
            out = model(ids, output_hidden_states=True).hidden_states[-1][0]
            for end in range(len(prompt), len(prompt) + TOKENS):
                states.append(out[end - 1])  # token: ids[end]; head h predicts ids[end + 1 + h]
                futures.append(ids[0, end + 1 : end + 1 + HEADS].tolist())
    heads = save_fitted_heads(folder / "heads", torch.stack(states), futures)
    expected = oracle(model, heads, TREE, prompts, TOKENS)
    assert_chaotic([result.token_ids for result in expected])
    return Fitted(path, heads, prompts, expected)


@pytest.fixture(scope="module")
def llm(fitted: Fitted) -> Iterator[LLM]:
    with engine(fitted.model, medusa(fitted.heads, TREE.to_lists())) as llm:
        yield llm


def test_fitted_heads_have_high_acceptance(fitted: Fitted) -> None:
    accepted = [n for result in fitted.expected for n in result.accepted_per_step]
    assert sum(accepted) > 0.8 * len(accepted)
    assert {0, 1, 2, 3} <= set(accepted)


def test_accepts_what_the_oracle_accepts(llm: LLM, fitted: Fitted) -> None:
    assert_agreement(llm, fitted.prompts, fitted.expected, TOKENS)


def test_one_request_at_a_time(llm: LLM, fitted: Fitted) -> None:
    few = slice(sized(3, 1))
    for prompt, result in zip(fitted.prompts[few], fitted.expected[few], strict=True):
        assert_agreement(llm, [prompt], [result], TOKENS)


def by_count(verdict: Verdict) -> Verdict:
    """The row of the last accepted node if the tree were a chain."""
    return replace(verdict, path=replace(verdict.path, last_node=verdict.path.num_accepted))


def at_root(verdict: Verdict) -> Verdict:
    path = verdict.path
    return replace(verdict, path=replace(path, last_node=torch.zeros_like(path.last_node)))


def verdict_location() -> tuple[type, str, str]:
    """(class, method, attribute): the drafting call, and the verdict it uses."""
    from vllm_medusa.worker.trees import Trees

    return Trees, "end", "verdict"


@pytest.mark.parametrize("wrong", [by_count, at_root], ids=lambda wrong: wrong.__name__)
def test_hidden_state_of_the_wrong_node(
    llm: LLM,
    fitted: Fitted,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[Verdict], Verdict],
) -> None:
    """A negative control: tokens stay equal, acceptance drops."""
    owner, method, verdict = verdict_location()
    original = getattr(owner, method)

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, verdict) is not None:
            setattr(self, verdict, wrong(getattr(self, verdict)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, propose)
    with recorded_steps() as steps:
        got = complete(llm, fitted.prompts, greedy(TOKENS))
    right = [n for result in fitted.expected for n in result.accepted_per_step]
    for prompt, completion, result in zip(fitted.prompts, got, fitted.expected, strict=True):
        assert list(completion.token_ids) == result.token_ids
        assert accepted_per_step(steps, prompt) != result.accepted_per_step
    assert mean_accepted(steps) < 0.85 * sum(right) / len(right)


@pytest.mark.parametrize("tree", ["own", "mc_sim_7b_63"])
def test_trained_model(tree: str) -> None:
    """Trained heads on real prompts, in fp32."""
    own = peek_heads(TRAINED_HEADS).tree
    assert own is not None
    topology = TokenTree.from_paths(own) if tree == "own" else load_preset(tree)
    prompts = code_prompts(0, 12)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    expected = oracle(model, TRAINED_HEADS, topology, prompts, 64)
    with engine(TARGET, medusa(TRAINED_HEADS, topology.to_lists())) as llm:
        assert assert_agreement(llm, prompts, expected, 64) > 0.5
