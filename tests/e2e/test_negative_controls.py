"""Removing any part of the tree logic breaks equality with plain vLLM: the tests can fail.

Each control breaks one part of the worker. The hidden state of the wrong node is different:
it only affects drafts, so it costs acceptance, never equality; `test_decode_agreement` covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, random_prompts
from support.models import VOCAB
from support.planted import planted
from support.reference import Reference, differing, plain_greedy
from support.runner import compaction, on_v1, sized
from vllm import LLM

from vllm_medusa.worker import cpu_attention
from vllm_medusa.worker import trees as positions  # module where they are looked up

pytestmark = pytest.mark.engine

TOKENS = sized(40, 24)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    with on_v1(), engine(chaotic_llama) as llm:
        return plain_greedy(
            llm, random_prompts(sized(24, 5), VOCAB, shortest=8, longest=120), TOKENS
        )


@pytest.fixture(scope="module")
def llm(reference: Reference, chaotic_llama: str, random_heads: str) -> Iterator[LLM]:
    with engine(chaotic_llama, medusa(random_heads, {"dense": [3, 2, 2]})) as llm:
        yield llm


def no_compaction(patch: Patch) -> None:
    patch.setattr(compaction(), "compact_group", lambda *args: None)


def causal_mask(patch: Patch) -> None:
    """Every node attends to all nodes before it."""
    build = cpu_attention.plan_trees

    def plan_trees(tree: Any, *args: Any) -> Any:
        causal = torch.ones_like(tree.ancestors).tril()
        return build(replace(tree, ancestors=causal), *args)

    patch.setattr(cpu_attention, "plan_trees", plan_trees)


def positions_by_slot(patch: Patch) -> None:
    """vLLM's own positions: node i is i after its root."""
    patch.setattr(positions, "write_node_positions", lambda *args: None)


def compaction_of_one_layer(patch: Patch) -> None:
    compact = compaction().compact_group

    def first_only(layers: Any, names: list[str], *moves: Any) -> None:
        compact(layers, names[:1], *moves)

    patch.setattr(compaction(), "compact_group", first_only)


CONTROLS = [no_compaction, causal_mask, positions_by_slot, compaction_of_one_layer]


def outcome(llm: LLM, reference: Reference) -> list[int]:
    with planted(reference.prompts, reference.outputs, VOCAB):
        got = complete(llm, reference.prompts, greedy(TOKENS))
    return differing(reference.completions, got)


def test_equal_without_a_control(llm: LLM, reference: Reference) -> None:
    assert outcome(llm, reference) == []


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_each_control_differs(
    llm: LLM, reference: Reference, monkeypatch: Patch, control: Callable[[Patch], None]
) -> None:
    control(monkeypatch)
    assert len(outcome(llm, reference)) > sized(0.8, 0.6) * len(reference.prompts)


def test_equal_again_after_the_controls(llm: LLM, reference: Reference) -> None:
    assert outcome(llm, reference) == []
