"""Steps with trees need only kernels that the warm-up has compiled.

Triton itself reports what a launch would compile, for a GPU that is not present; nothing runs.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ahead_of_time import needed
from support.interpreter import NOT_INTERPRETING

pytest.importorskip("vllm")
pytest.importorskip("triton")
from support import triton_steps
from support.triton_steps import BLOCK, DIM, HEADS, KV_HEADS, MAX_SEQS, NODES, Buffers, build

from vllm_medusa.integration.attention import cuda_attention, cuda_metadata
from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.integration.startup.eagle_options import scratch_of
from vllm_medusa.integration.v2.cuda_warmup import warm_up_rules
from vllm_medusa.integration.v2.speculator import TreeSpeculator
from vllm_medusa.kv import kernel as kv
from vllm_medusa.kv.kernel import LayerCaches
from vllm_medusa.lookup import search as lookup
from vllm_medusa.sampler import launch as sampler
from vllm_medusa.scorer import launch
from vllm_medusa.scorer.paged import TreeBuffers
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam

pytestmark = NOT_INTERPRETING

LENGTH = 16384
STEPS = [  # (rows, context) of requests, nodes of each
    ([(NODES, 20)], [NODES]),
    ([(NODES, 8000)], [NODES]),
    ([(NODES, LENGTH - NODES)] * 2, [NODES] * 2),
    ([(NODES, 700)] * MAX_SEQS, [NODES] * MAX_SEQS),
    ([(3, 4000)], [3]),  # a truncated tree
    ([(2, 40), (1, 9000)], [2, 1]),
    ([(NODES, 20), (1, 7), (9, 0)], [NODES, 1, 1]),
    ([(NODES, 5000), (90, 0)], [NODES, 1]),
    ([(NODES, 9000), (170, 40), (1, 8)], [NODES, 1, 1]),
    ([(NODES, 9000), (3000, 0)], [NODES, 1]),  # without room for parts
]


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_metadata, "uses_kernel", lambda device_type: True)
    limits = launch.DeviceLimits(132, 227 * 1024, async_mma=True)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)
    cuda_metadata._splits.cache_clear()


def layer(dtype: torch.dtype, **changes: Any) -> Any:
    impl, scale = triton_steps.layer(**changes), torch.ones(1)
    cache = torch.zeros(2, KV_HEADS, BLOCK, 2 * DIM, dtype=dtype)
    return SimpleNamespace(impl=impl, kv_cache=cache, _k_scale=scale, _v_scale=scale)


@pytest.mark.usefixtures("on_a_gpu")
def test_attention(make_builder):
    builder, buffers = make_builder(length=LENGTH), Buffers()
    buffers.block_table = torch.zeros(MAX_SEQS, 13, dtype=torch.int32)
    layers = {
        "plain": layer(torch.float32),
        "window": layer(torch.float32, sliding_window=9, sinks=torch.zeros(HEADS)),
        "fp8": layer(torch.uint8, kv_cache_dtype="fp8", logits_soft_cap=4.0),
    }
    group = SimpleNamespace(layer_names=list(layers), get_metadata_builder=lambda: builder)
    with needed() as compiled:
        cuda_attention.warm_up(layers, [group])
    parts = set()
    with needed() as used:
        for requests, nodes in STEPS:
            metadata = build(builder, buffers.batch(requests), nodes)
            parts.add(metadata.paged.num_splits)
            query = torch.zeros(metadata.num_actual_tokens, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
            out = torch.empty(query.shape)
            for made in layers.values():
                made.impl.forward(made, query, query, query, made.kv_cache, metadata, out)
    assert 1 in parts and max(parts) > 32
    assert used <= compiled
    assert len(used) >= 3 * 4 + 2  # each layer: two tiles, in parts or not; and merges


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(("num_sms", "expected"), [(132, 64), (4, 1)])
def test_levels_of_a_drafter(make_builder, monkeypatch, num_sms, expected):
    """Any number of requests and any length: in parts or, where a batch fills the GPU, whole."""
    limits = launch.DeviceLimits(num_sms, 227 * 1024, async_mma=True)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)
    builder, buffers = make_builder(length=8 * LENGTH), Buffers()
    trees, beam = builder._trees, Beam(3, 3, 4)
    scratch = TreeBuffers.allocate(MAX_SEQS, scratch_of(beam), "cpu", is_tree=True)
    builder._trees = replace(trees, beam=beam, branches=scratch)
    layers = {"plain": layer(torch.float32)}
    group = SimpleNamespace(layer_names=list(layers), get_metadata_builder=lambda: builder)
    with needed() as compiled:
        cuda_attention.warm_up(layers, [group], branches=True)
    splits = set()
    with needed() as used:
        for count in range(1, MAX_SEQS + 1):
            for context in (0, 100, 1000, 4000, LENGTH, 8 * LENGTH - 20):
                common = buffers.batch([(beam.width, context)] * count)
                seen = torch.ones(count, beam.width, scratch_of(beam), dtype=torch.bool)
                depths = torch.zeros(seen.shape[2], dtype=torch.int64)
                metadata = builder.build_branches(common, seen, buffers.seq_lens[:count], depths)
                splits.add(metadata.paged.num_splits)
                query = torch.zeros(count * beam.width, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
                made, out = layers["plain"], torch.empty(query.shape)
                made.impl.forward(made, query, query, query, made.kv_cache, metadata, out)
    assert expected in splits
    assert used <= compiled


def many(make: Callable[[int, int], None], nodes: int) -> set[tuple[str, str]]:
    with needed() as used:
        for batch in (1, 2, 3, 16):
            for width in (1, 2, 7, 16, 17, 64, 65, 100, 128, 130, 193, 255, nodes):
                make(batch, width)
    return used


def target_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """As from vLLM's models: rows of a padded vocabulary, without the padding."""
    return torch.zeros(rows, -(-vocab // 64) * 64, dtype=dtype)[:, :vocab]


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [512, 501])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_acceptance(dtype, vocab, dynamic):
    """At temperature 1 vLLM passes the target's logits unchanged, otherwise a copy in fp32."""
    tree = TokenTree.dense([15, 16])
    nodes, static = tree.num_nodes, TreeTensors.from_tree(tree)
    drafted: Any = SimpleNamespace(
        static=None,
        _on_host=False,
        _max_depth=tree.max_depth,
        parents=static.parents.clamp_min(-1).repeat(16, 1),
    )

    def trees(batch):
        if not dynamic:
            return static.batch
        return functools.partial(RequestTrees.topologies, drafted, torch.arange(batch))

    with needed() as compiled:
        warm_up_rules(trees(1), nodes, target_logits(2, vocab, dtype))

    def step(batch, width):
        tree = trees(batch)(width, torch.ones(batch, dtype=torch.int64))
        ids = torch.zeros(batch, width, dtype=torch.int64)
        sampler.target_verdict(tree, ids, ids)
        logits = target_logits(batch * width, vocab, dtype)
        copy = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        for given in (logits, copy, logits[width:]):  # the last is a part of a large batch
            sampler.typical_path(tree, ids, given, ids, torch.ones(batch), torch.ones(batch))

    used = many(step, nodes)
    assert used <= compiled
    assert {name for name, _ in used} == {"walk", "vocabulary", "plausible"}


def test_compaction():
    """One kernel per cache, which vLLM's own warm-up has already compiled."""
    caches = LayerCaches.of([torch.zeros(4, 2, BLOCK, 8)])

    def step(batch, width):
        slots = torch.zeros(batch, width, dtype=torch.int64)
        kv.compact_layers(caches, slots, slots[:, :3], slots[:, 0].contiguous())

    assert len(many(step, 256)) == 1


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("length", [512, 777])
def test_lookup(length):
    """Any batch, and views of the text table up to any length."""
    texts, maximum = torch.zeros(20, length, dtype=torch.int32), 63
    with needed() as compiled:
        options = SimpleNamespace(tree=SimpleNamespace(max_depth=5))
        trees = SimpleNamespace(num_nodes=maximum + 1, options=options)
        TreeSpeculator.warm_up_lookup(SimpleNamespace(trees=trees), texts)

    def step(batch, width):
        slots = torch.arange(batch + 1)[1:]
        trees = DraftTrees.roots(batch, maximum + 1, "cpu")
        _, found, _ = lookup.continuations(
            texts[:, :width], slots, torch.zeros_like(slots), maximum
        )
        lookup.join(trees, found, found.float(), 5)

    assert many(step, length) == compiled and len(compiled) == 2
