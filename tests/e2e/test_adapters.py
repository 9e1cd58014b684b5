"""Several LoRA adapters in a batch: plain vLLM's tokens, with drafts accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.eagle_runs import Case, eagle_config
from support.engines import engine, greedy, medusa, metric, random_prompts, worker_of
from support.lora import RANK, save_adapter
from support.models import HIDDEN, VOCAB
from support.outcomes import Outcome, assert_same_with_trees, seeded, steady_outcomes
from support.runner import ON_V2, sized
from support.spies import accepted_per_step, mean_accepted
from vllm import LLM, SamplingParams
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.integration.target import adapters_left_out, store_target_rows

pytestmark = pytest.mark.engine

TREE = [[0], [1], [0, 0], [1, 0], [1, 0, 0]]
TOKENS = sized(28, 8)
SHARED = random_prompts(sized(4, 1), VOCAB, shortest=40, longest=80, seed=41)
# One more slot than adapters: on CPUs vLLM adds the last slot's to requests without one.
ENGINE: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK,
    "enable_prefix_caching": True, "block_size": 32}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """None, an adapter of the layers, and one that also adapts the LM head."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [save_adapter(folder / str(i), seed=i, lm_head=i == 2) for i in (1, 2)]
    return [None, *(LoRARequest(f"adapter {i}", i, path) for i, path in enumerate(paths, 1))]


def requests(adapters: list[Any]) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    """Every prompt with every adapter, greedy and sampled; neighbors have different adapters."""
    cases = [(prompt, heat, adapter) for prompt in SHARED for heat in (0.0, 0.9)
             for adapter in adapters]  # fmt: skip
    params = seeded(len(cases), 7000, max_tokens=TOKENS, logprobs=2)
    for param, (_, heat, _) in zip(params, cases, strict=True):
        param.temperature = heat
    return [case[0] for case in cases], params, [case[2] for case in cases]


def test_eagle(eagle_case: Case, adapters: list[Any]) -> None:
    """Each request's tokens are plain vLLM's, and the drafter is as good without an adapter.

    Runs before `llm`, because only one engine can exist at a time.
    """
    learned = eagle_case.prompts[: sized(4, 1)]
    prompts, params, chosen = requests(adapters)
    prompts, chosen = prompts + learned, chosen + [None] * len(learned)
    params += [greedy(TOKENS) for _ in learned]
    with engine(eagle_case.target, **ENGINE) as llm:
        plain = steady_outcomes(llm, prompts, params, chosen)
    config = eagle_config(eagle_case, {"width": 3, "depth": 3}, budget=8)
    with engine(eagle_case.target, config, **ENGINE) as llm:
        steps = assert_same_with_trees(llm, plain, prompts, params, chosen)
        runner = worker_of(llm).model_runner
        drafter = runner.speculator.drafter if ON_V2 else runner.drafter
        modules = drafter.model.modules()
        assert not any(isinstance(module, BaseLayerWithLoRA) for module in modules)
    assert len({outcome.tokens for outcome in plain}) == len(plain)
    accepted = [sum(accepted_per_step(steps, prompt)) for prompt in learned]
    assert min(accepted) > TOKENS / 3


@pytest.fixture(scope="module")
def plain(chaotic_llama: str, adapters: list[Any]) -> list[Outcome]:
    with engine(chaotic_llama, **ENGINE) as llm:
        return steady_outcomes(llm, *requests(adapters))


@pytest.fixture(scope="module")
def llm(plain: object, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    with engine(chaotic_llama, medusa(random_heads, TREE), **ENGINE) as llm:
        yield llm


def test_adapters_in_one_batch(llm: LLM, plain: list[Outcome], adapters: list[Any]) -> None:
    assert len({outcome.tokens for outcome in plain}) == len(plain)
    steps = assert_same_with_trees(llm, plain, *requests(adapters))
    assert mean_accepted(steps) > 1.2
    assert max(map(len, steps)) == len(plain)


def test_cached_prefixes_belong_to_an_adapter(
    llm: LLM, plain: list[Outcome], adapters: list[Any]
) -> None:
    """The same prompts again: each reads the entries that were written with its own adapter."""
    before = metric(llm, "prefix_cache_hits")
    assert_same_with_trees(llm, plain, *requests(adapters))
    assert metric(llm, "prefix_cache_hits") - before >= 32 * len(plain)


def test_heads_draft_with_the_target_s_own_lm_head(llm: LLM) -> None:
    """The wrapped LM head would apply the adapters of the step's rows to the heads' rows."""
    runner = worker_of(llm).model_runner
    drafter, target = runner.drafter, runner.model
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(6))
    rows = drafter.heads(states)
    own = target.logits_processor.base_layer(target.lm_head, rows.flatten(0, 1))
    assert drafter._lm_head(rows.flatten(0, 1))[:, :VOCAB].equal(own[:, :VOCAB])
    known = torch.tensor([300, 7, 11])
    heads = MedusaHeads(1, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=known)
    with adapters_left_out(drafter._adapted):
        store_target_rows(heads, target, states.device, states.dtype)
    logits = heads.compute_logits(states[:, None])[:, 0]
    own = target.logits_processor.base_layer(target.lm_head, states)
    torch.testing.assert_close(logits, own[:, known])
