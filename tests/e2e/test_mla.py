"""Trees on a tiny DeepSeek, in both of vLLM's MLA backends for CPUs: plain vLLM's tokens.

The reference backend computes whole prompts without a prefix cache; the one for AMX has both, and
is also tested with an MTP module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, metric, random_prompts
from support.mla import save_deepseek
from support.models import VOCAB, save_random_heads
from support.mtp import DEEPSEEK, LAYERS, save_random
from support.planted import planted
from support.reference import Reference, assert_chaotic, differing, plain_greedy
from support.spies import assert_reported, mean_accepted, mixed, recorded_steps
from transformers import AutoModelForCausalLM
from vllm import LLM

from vllm_medusa.integration.attention import cpu_attention, cpu_mla
from vllm_medusa.integration.v1.runner import MedusaModelRunner
from vllm_medusa.scorer.latent import LatentPlan

pytestmark = pytest.mark.engine

Patch = pytest.MonkeyPatch
TOKENS = 36
NEAR_TIE = 2 * 2**-3  # bf16: two roundings of logits of 16 to 32
TREE = {"dense": [3, 2, 2, 1]}  # 33 draft nodes, depth 4
# Few blocks, so that requests are preempted.
REFERENCE = {"attention_backend": "CPU_MLA", "dtype": "float32", "num_gpu_blocks_override": 70}
AMX = {
    "attention_backend": "AMX_MLA",
    "dtype": "bfloat16",
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "max_num_batched_tokens": 160,
    "enable_prefix_caching": True,
}
PROMPTS = [
    [*shared, *own]
    for shared in random_prompts(2, VOCAB, shortest=60, longest=100, seed=5)
    for own in random_prompts(8, VOCAB, shortest=1, longest=60, seed=6)
]
PARAMS = [greedy(TOKENS, temperature=0.9, seed=i) for i in range(len(PROMPTS))]
on_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="no AMX")
BACKENDS = [
    pytest.param((REFERENCE, "heads"), id="CPU_MLA"),
    pytest.param((AMX, "heads"), id="AMX_MLA", marks=on_amx),
    pytest.param((AMX, "mtp"), id="AMX_MLA-mtp", marks=on_amx),
]


@dataclass
class Setting:
    target: str
    drafting: dict[str, Any]
    options: dict[str, Any]
    plain: Reference
    seeded: list[Any]  # plain vLLM's completions of `PARAMS`

    @property
    def is_mtp(self) -> bool:
        """Then planted paths are short, and move fewer entries."""
        return bool(self.drafting["method"] == "mtp")

    @property
    def exact(self) -> bool:
        """In bf16, plain vLLM's own tokens depend on how prompts are split into steps."""
        return self.options["dtype"] == "float32"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module", params=BACKENDS)
def setting(
    request: pytest.FixtureRequest, target: str, tmp_path_factory: pytest.TempPathFactory
) -> Setting:
    options, drafter = request.param
    options = options | {"max_model_len": 256}
    if drafter == "heads":
        drafting = medusa(save_random_heads(tmp_path_factory.mktemp("heads")), TREE)
    else:
        # without experts, whose choice flips in bf16
        target = save_random(
            tmp_path_factory.mktemp("mtp"), DEEPSEEK, first_k_dense_replace=LAYERS + 1
        )
        drafting = {"method": "mtp", "tree": {"width": 4, "depth": 5}, "budget": 24}
    # Plain vLLM can't compute parts of a seeded request's prompt on CPUs.
    with engine(target, **options | {"max_num_batched_tokens": 8192}) as llm:
        plain = plain_greedy(llm, PROMPTS, TOKENS, min_gap=0.0)
        seeded = complete(llm, PROMPTS, PARAMS)
    assert_chaotic(plain.outputs, distinct=0.3)
    return Setting(target, drafting, options, plain, seeded)


@pytest.fixture
def llm(setting: Setting) -> Iterator[LLM]:
    with engine(setting.target, setting.drafting, **setting.options) as llm:
        yield llm


def run(llm: LLM, setting: Setting) -> tuple[list[Any], list[float], list[Any]]:
    """Completions, by how much differing ones are less likely, and the steps."""
    with planted(PROMPTS, setting.plain.outputs, VOCAB) as moves, recorded_steps() as steps:
        got = complete(llm, PROMPTS, greedy(TOKENS))
    assert sum(moves) > 0.5 * len(moves)
    return got, setting.plain.gaps(got), steps


def test_equality(setting: Setting, llm: LLM) -> None:
    got, gaps, steps = run(llm, setting)
    assert max(gaps, default=0) <= (1e-3 if setting.exact else NEAR_TIE)
    assert len(gaps) < (0.2 if setting.exact else 0.5) * len(PROMPTS)
    assert_reported(steps, PROMPTS, got)
    assert mean_accepted(steps) > (1.2 if setting.is_mtp else 1.5)
    assert mixed(steps) and metric(llm, "num_preemptions") > 0
    if setting.options["attention_backend"] == "AMX_MLA":
        assert any(row.is_partial_prefill for step in mixed(steps) for row in step)
        assert metric(llm, "prefix_cache_hits") > 0
    outputs = [list(completion.token_ids) for completion in setting.seeded]
    with planted(PROMPTS, outputs, VOCAB), recorded_steps() as steps:
        got = complete(llm, PROMPTS, PARAMS)
    assert len(differing(setting.seeded, got)) <= (0 if setting.exact else len(PROMPTS) // 2)
    assert mean_accepted(steps) > 1


def no_compaction(patch: Patch) -> None:
    patch.setattr(cpu_attention, "compact_group", lambda *args: None)


def causal_mask(patch: Patch) -> None:
    """Every node attends to all nodes before it."""

    class Causal(LatentPlan):
        @classmethod
        def of(cls, starts: Any, base: Any, seen: Any, *args: Any) -> LatentPlan:
            causal = [torch.ones_like(mask).tril() for mask in seen]
            return LatentPlan.of(starts, base, causal, *args)

    patch.setattr(cpu_mla, "LatentPlan", Causal)


@pytest.mark.parametrize("breaks", [no_compaction, causal_mask])
def test_negative_controls(
    setting: Setting, llm: LLM, monkeypatch: Patch, breaks: Callable[[Patch], None]
) -> None:
    breaks(monkeypatch)
    _, gaps, _ = run(llm, setting)
    assert sum(gap > NEAR_TIE for gap in gaps) > (0.1 if setting.is_mtp else 0.5) * len(PROMPTS)


def test_logits_of_every_node(target: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """They equal those of a dense forward pass of transformers over the node's path."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    sample, checked = MedusaModelRunner._sample, 0

    def compare(self: Any, logits: Any, *args: Any) -> Any:
        nonlocal checked
        step = self.trees.step
        for row, req_id in enumerate(self.input_batch.req_ids if step is not None else ()):
            request = self.requests[req_id]
            tokens = [*request.prompt_token_ids, *request.output_token_ids]
            for node in range(int(step.num_nodes[row])):
                path = step.token_ids[row][step.tree.ancestors[row, node]].tolist()
                assert path[0] == tokens[-1]
                with torch.no_grad():
                    dense = model(torch.tensor([tokens[:-1] + path])).logits[0, -1]
                found = logits[step.row_of_node[row, node]]
                torch.testing.assert_close(found, dense, atol=2e-3, rtol=1e-3)
                checked += 1
        return sample(self, logits, *args)

    monkeypatch.setattr(MedusaModelRunner, "_sample", compare)
    heads, prompts = save_random_heads(tmp_path), random_prompts(2, VOCAB, 8, 40)
    with engine(target, medusa(heads, [[0], [1], [0, 0], [1, 0], [1, 1]]), **REFERENCE) as llm:
        complete(llm, prompts, greedy(12))
    assert checked > 100
