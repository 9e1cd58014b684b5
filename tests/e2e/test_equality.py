"""Token equality with plain vLLM, with long acceptances along branches other than the first.

The model is chaotic: one wrong key anywhere in a context changes all later tokens. Planted drafts
make nearly every step accept and move KV; random heads make nearly every step reject. Each negative
control disables one part of the worker, and must break equality. The hidden state of the wrong node
only affects drafts, so it lowers acceptance but never breaks equality; `test_decode_agreement`
covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import complete, engine, greedy, medusa, random_prompts
from support.models import VOCAB
from support.planted import planted
from support.reference import Reference, assert_chaotic, differing, plain_greedy
from support.runner import ON_V2, async_scheduling, on_v1, sized
from support.spies import assert_reported, mean_accepted, recorded_steps, tree_rows
from vllm import LLM

from vllm_medusa.integration.attention import cpu_attention
from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.tree import TokenTree

pytestmark = pytest.mark.engine

TOKENS = sized(40, 24)
EIGHT = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0, 0]]
SIXTY_THREE = "mc_sim_7b_63"
Patch = pytest.MonkeyPatch
TWO_HUNDRED = TokenTree.dense([4, 4, 3, 3]).prefix(201).to_lists()
# draft nodes -> tree, and the engine's block size (vLLM's CPU backend only has multiples of 32)
TREES = {8: (EIGHT, 32), 14: ({"dense": [2, 2, 2]}, 64), 63: (SIXTY_THREE, 128),
         200: (TWO_HUNDRED, 32)}  # fmt: skip
# draft nodes -> batch size -> prompts; every reference prompt is in some batch
PLANTED = sized(
    {8: {1: 4, 8: 32, 32: 64}, 14: {1: 4, 8: 16, 32: 90}, 63: {1: 4, 8: 16, 32: 64},
     200: {1: 4, 8: 16, 32: 32}},
    {nodes: {1: 1, 4: 4} for nodes in TREES},
)  # fmt: skip
ENGINES = sized([(nodes, False) for nodes in TREES], [(8, False), (63, True)])  # (nodes, async)


@pytest.fixture(scope="module")
def reference(chaotic_llama: str) -> Reference:
    """At least 90 prompts of 1 to 400 tokens; four on V2."""
    edges = [[7], [8, 9], [10 + i for i in range(400)]]
    prompts = edges + random_prompts(sized(93, 2), VOCAB, longest=sized(400, 60), seed=11)
    with on_v1(), engine(chaotic_llama) as llm:
        reference = plain_greedy(llm, prompts, TOKENS)
    if ON_V2:  # plain V2 gives the same
        few = reference.part(1, 2)
        with engine(chaotic_llama) as llm:
            assert complete(llm, few.prompts, greedy(TOKENS)) == few.completions
    return reference


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: f"{p[0]}_nodes{'_async' * p[1]}")
def tree_engine(
    request: pytest.FixtureRequest, reference: Reference, chaotic_llama: str, random_heads: str
) -> Iterator[tuple[int, LLM]]:  # after the reference: only one engine can exist at a time
    nodes, ahead = request.param
    tree, block_size = TREES[nodes]
    config = medusa(random_heads, tree)
    with (
        async_scheduling() if ahead else nullcontext(),
        engine(chaotic_llama, config, block_size=block_size) as llm,
    ):
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == ahead
        yield nodes, llm


def test_the_reference_is_meaningful(reference: Reference) -> None:
    lengths = {len(prompt) for prompt in reference.prompts}
    assert len(reference.prompts) >= sized(90, 4) and min(lengths) == 1 and max(lengths) == 400
    assert reference.dropped <= 0.05 * len(reference.prompts)
    assert_chaotic(reference.outputs)
    assert all(c.finish_reason == "length" for c in reference.completions)


@pytest.mark.parametrize("batch_size", sized([1, 8, 32], [1, 4]))
def test_planted_drafts(
    tree_engine: tuple[int, LLM], reference: Reference, batch_size: int
) -> None:
    nodes, llm = tree_engine
    part = reference.part(nodes, PLANTED[nodes][batch_size])
    got = []
    with planted(part.prompts, part.outputs, VOCAB) as moves, recorded_steps() as steps:
        for start in range(0, len(part.prompts), batch_size):
            prompts = part.prompts[start : start + batch_size]
            got += complete(llm, prompts, greedy(TOKENS))
    assert differing(part.completions, got) == []
    assert_reported(steps, part.prompts, got)
    assert max(map(len, steps)) == min(batch_size, len(part.prompts))
    assert max(row.num_nodes for row in tree_rows(steps)) == nodes + 1
    assert sum(moves) > sized(0.7, 0.5) * len(moves) > 0
    assert mean_accepted(steps) > sized(1.4, 1.0)


def test_random_heads(tree_engine: tuple[int, LLM], reference: Reference) -> None:
    nodes, llm = tree_engine
    part = reference.part(7 * nodes, sized(16, 2))
    with recorded_steps() as steps:
        got = complete(llm, part.prompts, greedy(TOKENS))
    assert differing(part.completions, got) == []
    assert_reported(steps, part.prompts, got)
    assert len(tree_rows(steps)) > 10 * len(part.prompts)


def no_compaction(patch: Patch) -> None:
    patch.setattr(cpu_attention, "compact_group", lambda *args: None)


def compaction_of_one_layer(patch: Patch) -> None:
    compact = cpu_attention.compact_group

    def first_only(layers: Any, names: list[str], *moves: Any) -> None:
        compact(layers, names[:1], *moves)

    patch.setattr(cpu_attention, "compact_group", first_only)


def causal_mask(patch: Patch) -> None:
    """Every node attends to all nodes before it."""
    build = cpu_attention.plan_trees

    def plan_trees(tree: Any, *args: Any) -> Any:
        causal = torch.ones_like(tree.ancestors).tril()
        return build(replace(tree, ancestors=causal), *args)

    patch.setattr(cpu_attention, "plan_trees", plan_trees)


def positions_by_slot(patch: Patch) -> None:
    """vLLM's own positions: node i is i after its root."""
    patch.setattr(RequestTrees, "write_positions", lambda *args: None)


CONTROLS = [no_compaction, compaction_of_one_layer, causal_mask, positions_by_slot]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
@pytest.mark.parametrize("tree_engine", ENGINES[:1], indirect=True, ids=["8_nodes"])
def test_each_control_differs(
    tree_engine: tuple[int, LLM],
    reference: Reference,
    monkeypatch: Patch,
    control: Callable[[Patch], None],
) -> None:
    part = reference.part(3, sized(24, 4))
    control(monkeypatch)
    with planted(part.prompts, part.outputs, VOCAB):
        got = complete(tree_engine[1], part.prompts, greedy(TOKENS))
    assert len(differing(part.completions, got)) > 0.6 * len(part.prompts)
