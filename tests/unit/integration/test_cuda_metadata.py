"""A step's metadata for the Triton attention, and its persistent buffers."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from support.in_torch import paged_tree_attention_torch
from support.random_trees import random_parents
from support.triton_steps import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
    MAX_SEQS,
    NODES,
    TREE,
    Buffers,
    build,
    make_config,
    paged,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from vllm_medusa.integration.attention import cuda_metadata
from vllm_medusa.integration.attention.cuda_metadata import TreeMetadataBuilder
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace
from vllm_medusa.scorer.step import Trees
from vllm_medusa.tree.batch import TreeBatch, TreeTensors


@pytest.fixture
def splits(monkeypatch):
    """As if a GPU needed 3 key parts."""
    monkeypatch.setattr(cuda_metadata, "_splits", lambda *args: 3)


def addresses(batch: PagedBatch) -> dict[str, Any]:
    """All addresses that a captured graph uses."""
    kept = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            kept[field.name] = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        elif isinstance(value, SplitWorkspace):
            kept[field.name] = (value.values.data_ptr(), value.lse.data_ptr())
        else:
            kept[field.name] = value
    return kept


class TestMetadata:
    def test_without_medusa_it_equals_vllms(self, target, make_builder):
        config, builder = make_config(target, None), make_builder(None)
        metadata = build(builder, Buffers().batch([(NODES, 0)]), None)
        assert type(metadata) is TritonAttentionMetadata
        stock, spec = TreeMetadataBuilder.__mro__[1], builder.kv_cache_spec
        support = stock.get_cudagraph_support(config, spec)
        assert builder.get_cudagraph_support(config, spec) == support

    def test_without_trees_it_equals_vllms(self, make_builder):
        metadata = build(make_builder(), Buffers().batch([(5, 0), (1, 9)]), None)
        assert type(metadata) is TritonAttentionMetadata

    def test_a_step(self, make_builder):
        """A whole tree, a truncated one, a plain decode and prefill."""
        common = Buffers().batch([(NODES, 20), (3, 40), (1, 7), (12, 0)])
        batch = paged(build(make_builder(), common, [NODES, 3, 1, 1]))
        assert batch.is_tree.tolist() == [True, True, False, False]
        assert batch.depths.tolist() == [list(TREE.depths)] * 4
        tensors = TreeTensors.from_tree(TREE)
        assert torch.equal(batch.ancestor_bits, tensors.ancestor_bits.expand(4, -1, -1))
        assert batch.ancestor_bits.stride(0) == batch.depths.stride(0) == 0
        assert batch.max_query_len == 64  # 12 rows of 2 heads each: the large tile, of 128
        for own, theirs in (
            (batch.cu_query_lens, common.query_start_loc),
            (batch.seq_lens, common.seq_lens),
            (batch.block_table, common.block_table_tensor),
        ):
            assert own.data_ptr() == theirs.data_ptr()

    @pytest.mark.usefixtures("splits")
    def test_buffers_are_reused(self, make_builder):
        """After any earlier steps, a step of the same shape is read from the same addresses."""
        builder, buffers = make_builder(), Buffers()
        shape = [(NODES, 20), (NODES, 3)]
        before = addresses(paged(build(builder, buffers.batch(shape), [NODES, NODES])))
        build(builder, buffers.batch([(30, 0), (NODES, 5), (1, 1)]), [1, NODES, 1])
        build(builder, buffers.batch([(30, 0)]), None)
        after = paged(build(builder, buffers.batch(shape), [NODES, 1]))
        assert addresses(after) == before
        assert after.is_tree.tolist() == [True, False]
        assert after.num_splits == 3

    def test_the_uniform_case_has_full_graphs(self, target, random_heads, make_builder):
        config, builder = make_config(target, random_heads), make_builder()
        support = builder.get_cudagraph_support(config, builder.kv_cache_spec)
        assert support == AttentionCGSupport.UNIFORM_BATCH

    @pytest.mark.usefixtures("splits")
    @pytest.mark.parametrize("real", [4, 3])
    @pytest.mark.parametrize("size", [NODES, 3, 2])
    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_replay_of_a_graph(self, make_builder, real, size, dynamic):
        """Metadata built for capture is right for later steps of its size, also padded ones.

        Sizes below the whole tree's are captured if vLLM has several: trees are then truncated.
        """
        builder, buffers = make_builder(dynamic=dynamic), Buffers()
        capture = builder.build_for_cudagraph_capture(buffers.batch([(size, 0)] * 4))
        captured = paged(capture)
        assert captured.is_tree.all()
        assert capture.seq_lens.tolist() == [1] * 4
        assert captured.num_splits == 3
        other = own_trees(2, seed=1) if dynamic else None
        build(builder, buffers.batch([(3, 3), (NODES, 8)]), [1, NODES], other)  # some other step

        requests = [(size, 20), (size, 3), (size, 60), (size, 11)][:real]
        nodes = [size, 1, size, 1][:real]  # a plain request with as many rows is not a tree
        trees = own_trees(real, seed=2) if dynamic else None
        fresh = paged(build(builder, buffers.batch(requests, padded=4), nodes, trees))
        assert addresses(fresh) == addresses(captured)
        outs = [attended(batch, 4 * size) for batch in (captured, fresh)]
        assert torch.equal(*[out[: real * size] for out in outs])
        assert outs[0][: real * size].isfinite().all()
        assert outs[0][real * size :].isnan().all()
        assert captured.is_tree.tolist()[:real] == [n > 1 for n in nodes]
        tree = (trees or TreeTensors.from_tree(TREE).batch)(size, torch.tensor(nodes))
        for b in range(0, real, 2):
            assert torch.equal(captured.depths[b, :size], tree.depths[b])
            assert torch.equal(captured.ancestor_bits[b, :size], tree.ancestor_bits[b])

    @pytest.mark.parametrize("size", [NODES, 3])
    def test_a_captured_graph_sees_batches_without_trees(self, make_builder, size):
        builder, buffers = make_builder(), Buffers()
        captured = paged(builder.build_for_cudagraph_capture(buffers.batch([(size, 0)] * 2)))
        build(builder, buffers.batch([(size, 4), (size, 9)]), None)
        assert not captured.is_tree.any()

    def test_one_row_per_request_is_captured_as_in_vllm(self, make_builder):
        captured = make_builder().build_for_cudagraph_capture(Buffers().batch([(1, 0)] * 2))
        assert type(captured) is TritonAttentionMetadata

    def test_every_request_has_its_own_tree(self, make_builder):
        """A step with fewer nodes leaves stale rows that no row attends to."""
        builder, buffers = make_builder(dynamic=True), Buffers()
        build(builder, buffers.batch([(NODES, 9)] * 3), [NODES] * 3, own_trees(3, seed=5))
        trees = own_trees(3, seed=6)
        common = buffers.batch([(5, 20), (1, 7), (4, 40)])
        got = paged(build(builder, common, [5, 1, 4], trees))
        tree = trees(5, torch.tensor([5, 1, 4]))
        assert got.is_tree.tolist() == [True, False, True]
        alone = replace(got, depths=tree.depths, ancestor_bits=tree.ancestor_bits)
        wrong = replace(got, ancestor_bits=got.ancestor_bits.flip(0), depths=got.depths.flip(0))
        out = attended(got, 10)
        assert torch.equal(out, attended(alone, 10)) and out.isfinite().all()
        assert not torch.equal(out, attended(wrong, 10))

    def test_prefill_gets_no_more_parts_than_fit(self, make_builder, monkeypatch):
        monkeypatch.setattr(cuda_metadata, "_splits", lambda shape, batch, *_: 8 // batch)
        builder, buffers = make_builder(), Buffers()
        for beside, parts in (([], 8), ([(12, 0)], 2), ([(99, 0)], 1)):
            batch = buffers.batch([(NODES, 60), *beside])
            assert paged(build(builder, batch, [NODES, 1][: 1 + len(beside)])).num_splits == parts


def own_trees(batch: int, seed: int) -> Trees:
    """A random tree for each request."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([random_parents(NODES, generator) for _ in range(batch)])
    return lambda width, counts: TreeBatch.from_parents(parents[:, :width], counts, NODES)


def attended(batch: PagedBatch, rows: int) -> Tensor:
    """Attention over random queries and caches in vLLM's layout; NaN where nothing is written."""
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, HEADS, DIM, generator=generator)
    cache = torch.randn(MAX_SEQS * 8, KV_HEADS, BLOCK, 2 * DIM, generator=generator)
    keys, values = cache.transpose(1, 2).split(DIM, -1)
    out = torch.full_like(query, torch.nan)
    paged_tree_attention_torch(query, keys, values, batch, 0.2, out=out)
    return out
