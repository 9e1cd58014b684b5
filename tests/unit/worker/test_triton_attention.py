"""The attention for CUDA without an engine: what a step's metadata holds, a layer, compaction.

Our kernel's place is taken by its reference here, as everywhere without a GPU; an engine that runs
the kernel is in ``tests/worker/test_triton_engine.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from support.models import COMMON
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_medusa.config import MedusaConfigError
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace, paged_tree_attention
from vllm_medusa.tree import TokenTree, TreeTensors
from vllm_medusa.worker import compat, triton_attention
from vllm_medusa.worker.options import (
    V2_CUDA_WORKER,
    choose_triton_attention,
)
from vllm_medusa.worker.step import TreeStep
from vllm_medusa.worker.triton_attention import (
    TreeAttentionBackend,
    TreeAttentionImpl,
    TreeMetadata,
    TreeMetadataBuilder,
    compact_group,
)

TREE = TokenTree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
NODES = TREE.num_nodes  # 7
MOST, BLOCK, DIM = 6, 16, 32
HEADS, KV_HEADS = COMMON["num_attention_heads"], COMMON["num_key_value_heads"]


@pytest.fixture(scope="module")
def make_config(
    tmp_path_factory: pytest.TempPathFactory, random_heads: str
) -> Callable[[bool], Any]:
    import transformers

    model: Path = tmp_path_factory.mktemp("target")
    config = transformers.LlamaConfig(**COMMON)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(model)

    def make(trees: bool) -> Any:
        asked = {"method": "medusa", "model": random_heads, "tree": TREE.to_lists()}
        return EngineArgs(
            str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=MOST,
            max_model_len=512,
            speculative_config=asked if trees else None,
        ).create_engine_config()

    return make


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU wanted the keys in 3 parts."""
    monkeypatch.setattr(triton_attention, "_splits", lambda *args: 3)


@pytest.fixture
def builder(make_config: Callable[[bool], Any]) -> TreeMetadataBuilder:
    return make_builder(make_config(True))


def make_builder(config: Any) -> TreeMetadataBuilder:
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
    )
    return TreeMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


class Buffers:
    """The runner's: written in place from step to step."""

    def __init__(self) -> None:
        self.query_start_loc = torch.zeros(MOST + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(MOST, dtype=torch.int32)
        self.block_table = torch.arange(MOST * 8, dtype=torch.int32).view(MOST, 8)
        self.slot_mapping = torch.zeros(200, dtype=torch.int64)

    def batch(self, requests: list[tuple[int, int]], padded: int = 0) -> CommonAttentionMetadata:
        """Requests of (rows, context), padded to ``padded`` requests of whole trees."""
        count, rows = len(requests), [rows for rows, _ in requests]
        padded = max(padded, count)
        total = sum(rows)
        ends = np.cumsum(rows).tolist() + [total] * (padded - count)
        self.query_start_loc[: padded + 1] = torch.tensor([0, *ends], dtype=torch.int32)
        self.seq_lens[:count] = torch.tensor([sum(r) for r in requests], dtype=torch.int32)
        self.seq_lens[count:] = 0
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: padded + 1],
            query_start_loc_cpu=self.query_start_loc[: padded + 1].clone(),
            seq_lens=self.seq_lens[:padded],
            num_reqs=padded,
            num_actual_tokens=total if padded == count else padded * NODES,
            max_query_len=max(rows),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.block_table[:padded],
            slot_mapping=self.slot_mapping,
        )


def step_of(num_nodes: list[int]) -> TreeStep:
    total = sum(num_nodes)
    return TreeStep.build(
        TreeTensors.from_tree(TREE),
        np.array(num_nodes, dtype=np.int64),
        torch.arange(total),
        torch.zeros(total, dtype=torch.int32),
    )


def build(
    builder: TreeMetadataBuilder, common: CommonAttentionMetadata, num_nodes: list[int] | None
) -> TritonAttentionMetadata:
    """As `TreeModelState` does."""
    builder.step = None if num_nodes is None else step_of(num_nodes)
    try:
        return builder.build(0, common)
    finally:
        builder.step = None


def paged(metadata: TritonAttentionMetadata) -> PagedBatch:
    assert isinstance(metadata, TreeMetadata)
    assert metadata.paged is not None
    return metadata.paged


def addresses(batch: PagedBatch) -> dict[str, Any]:
    """Everything that a captured graph holds on to."""
    kept: dict[str, Any] = {}
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
    def test_without_medusa_it_is_vllms(self, make_config: Callable[[bool], Any]) -> None:
        config = make_config(False)
        builder = make_builder(config)
        metadata = build(builder, Buffers().batch([(NODES, 0)]), None)
        assert type(metadata) is TritonAttentionMetadata
        stock = TreeMetadataBuilder.__mro__[1]
        spec = builder.kv_cache_spec
        assert builder.get_cudagraph_support(config, spec) == stock.get_cudagraph_support(
            config, spec
        )

    def test_without_trees_it_is_vllms(self, builder: TreeMetadataBuilder) -> None:
        metadata = build(builder, Buffers().batch([(5, 0), (1, 9)]), None)
        assert type(metadata) is TritonAttentionMetadata

    def test_a_step(self, builder: TreeMetadataBuilder) -> None:
        """A whole tree, a cut one, a plain decode and prefill."""
        common = Buffers().batch([(NODES, 20), (3, 40), (1, 7), (12, 0)])
        batch = paged(build(builder, common, [NODES, 3, 1, 1]))
        assert batch.is_tree.tolist() == [True, True, False, False]
        assert batch.depths.tolist() == [list(TREE.depths)] * 4
        tensors = TreeTensors.from_tree(TREE)
        assert torch.equal(batch.ancestor_bits, tensors.ancestor_bits.expand(4, -1, -1))
        assert batch.ancestor_bits.stride(0) == batch.depths.stride(0) == 0
        assert batch.max_query_len == 12
        for own, theirs in (
            (batch.cu_query_lens, common.query_start_loc),
            (batch.seq_lens, common.seq_lens),
            (batch.block_table, common.block_table_tensor),
        ):
            assert own.data_ptr() == theirs.data_ptr()

    @pytest.mark.usefixtures("splits")
    def test_buffers_stay(self, make_config: Callable[[bool], Any]) -> None:
        """Whatever the steps before it, a step of one shape is read from the same places."""
        builder, buffers = make_builder(make_config(True)), Buffers()
        shape = [(NODES, 20), (NODES, 3)]
        before = addresses(paged(build(builder, buffers.batch(shape), [NODES, NODES])))
        build(builder, buffers.batch([(30, 0), (NODES, 5), (1, 1)]), [1, NODES, 1])
        build(builder, buffers.batch([(30, 0)]), None)
        after = paged(build(builder, buffers.batch(shape), [NODES, 1]))
        assert addresses(after) == before
        assert after.is_tree.tolist() == [True, False]
        assert after.num_splits == 3

    def test_the_uniform_case_has_full_graphs(
        self, make_config: Callable[[bool], Any], builder: TreeMetadataBuilder
    ) -> None:
        support = builder.get_cudagraph_support(make_config(True), builder.kv_cache_spec)
        assert support == AttentionCGSupport.UNIFORM_BATCH

    @pytest.mark.usefixtures("splits")
    @pytest.mark.parametrize("real", [4, 3])
    def test_a_graph_replayed(self, make_config: Callable[[bool], Any], real: int) -> None:
        """What was built for capture is right for later steps of its size, padded ones too."""
        builder, buffers = make_builder(make_config(True)), Buffers()
        capture = builder.build_for_cudagraph_capture(buffers.batch([(NODES, 0)] * 4))
        captured = paged(capture)
        assert captured.is_tree.all()
        assert capture.seq_lens.tolist() == [1] * 4
        assert captured.num_splits == 3
        build(builder, buffers.batch([(3, 3), (NODES, 8)]), [1, NODES])  # some other step

        requests = [(NODES, 20), (NODES, 3), (NODES, 60), (NODES, 11)][:real]
        nodes = [NODES, 1, NODES, 1][:real]  # a plain request of as many rows is no tree
        fresh = paged(build(builder, buffers.batch(requests, padded=4), nodes))
        assert addresses(fresh) == addresses(captured)
        query, keys, values = random_layer(4 * NODES)
        outs = [
            paged_tree_attention(
                query, keys, values, batch, 0.2, out=torch.full_like(query, torch.nan)
            )
            for batch in (captured, fresh)
        ]
        assert torch.equal(*[out[: real * NODES] for out in outs])
        assert outs[0][: real * NODES].isfinite().all()
        assert outs[0][real * NODES :].isnan().all()
        assert captured.is_tree.tolist()[:real] == [n > 1 for n in nodes]

    def test_a_uniform_batch_without_trees_is_told_to_the_graph(
        self, builder: TreeMetadataBuilder
    ) -> None:
        buffers = Buffers()
        captured = paged(builder.build_for_cudagraph_capture(buffers.batch([(NODES, 0)] * 2)))
        build(builder, buffers.batch([(NODES, 4), (NODES, 9)]), None)
        assert not captured.is_tree.any()

    def test_prefill_gets_no_more_parts_than_fit(
        self, make_config: Callable[[bool], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton_attention, "_splits", lambda shape, batch, *_: 8 // batch)
        builder, buffers = make_builder(make_config(True)), Buffers()
        alone = paged(build(builder, buffers.batch([(NODES, 60)]), [NODES]))
        assert alone.num_splits == 8
        beside = paged(build(builder, buffers.batch([(NODES, 60), (12, 0)]), [NODES, 1]))
        assert beside.num_splits == 2
        one = paged(build(builder, buffers.batch([(NODES, 60), (99, 0)]), [NODES, 1]))
        assert one.num_splits == 1


def random_layer(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and caches in vLLM's layout."""
    generator = torch.Generator().manual_seed(rows)
    query = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    cache = torch.randn(MOST * 8, KV_HEADS, BLOCK, 2 * DIM, generator=generator).to(dtype)
    keys, values = cache.transpose(1, 2).split(DIM, -1)
    return query, keys, values


def layer(**changes: Any) -> TreeAttentionImpl:
    options: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": DIM,
        "scale": 0.3,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return TreeAttentionImpl(**options | changes)


class TestLayer:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"sliding_window": 9},
            {"logits_soft_cap": 4.0},
            {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
            {"kv_cache_dtype": "fp8"},
        ],
        ids=["plain", "window", "soft cap", "sinks", "fp8"],
    )
    def test_attention(self, builder: TreeMetadataBuilder, changes: dict[str, Any]) -> None:
        """One tree and one chunk of prefill, every row alone against a softmax over what it sees.

        fp32 sums in another order: 1e-5.
        """
        metadata = build(builder, Buffers().batch([(NODES, 21), (5, 12)]), [NODES, 1])
        generator = torch.Generator().manual_seed(3)
        cache = torch.randn(MOST * 8, KV_HEADS, BLOCK, 2 * DIM, generator=generator)
        scales = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
        if changes.get("kv_cache_dtype") == "fp8":
            scales = SimpleNamespace(_k_scale=torch.tensor(0.7), _v_scale=torch.tensor(1.3))
            stored = cache.to(torch.float8_e4m3fn)
            cache = stored.float()
            kv_cache = stored.view(torch.uint8)
            factors = (0.7, 1.3)
        else:
            kv_cache, factors = cache, (1.0, 1.0)
        query = torch.randn(NODES + 5, HEADS, DIM, generator=generator)
        out = torch.full((NODES + 5 + 2, HEADS, DIM), torch.nan)  # more rows than the step has
        padded = torch.cat((query, query[:2]))
        impl = layer(**changes)
        result = impl.forward(scales, padded, query, query, kv_cache, metadata, out)
        assert result is out
        assert out[NODES + 5 :].isnan().all()

        tokens = cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, 2 * size], by slot
        window = changes.get("sliding_window", 10**6)
        cap, sinks = changes.get("logits_soft_cap"), changes.get("sinks")
        for row in range(NODES + 5):
            first = 0 if row < NODES else 8 * BLOCK  # slot of the request's token 0
            if row < NODES:
                path = [row]
                while path[0] > 0:
                    path.insert(0, TREE.parents[path[0]])
                seen = [(i, i) for i in range(21)] + [(21 + n, 21 + TREE.depths[n]) for n in path]
            else:
                seen = [(i, i) for i in range(12 + row - NODES + 1)]
            place = seen[-1][1]
            slots = [first + slot for slot, position in seen if position > place - window]
            keys, values = tokens[slots].repeat_interleave(HEADS // KV_HEADS, 1).split(DIM, -1)
            logits = torch.einsum("hd,lhd->hl", query[row], keys * factors[0]) * 0.3
            if cap:
                logits = cap * torch.tanh(logits / cap)
            if sinks is not None:
                logits = torch.cat((logits, sinks[:, None]), 1)
            weights = logits.softmax(1)[:, : len(slots)]
            expected = torch.einsum("hl,lhd->hd", weights, values * factors[1])
            assert (out[row] - expected).abs().max() < 1e-5

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"alibi_slopes": [0.1] * HEADS}, "ALiBi"),
            ({"chunk_lookback": 1}, "chunked"),
            ({"attn_type": AttentionType.ENCODER_DECODER}, "encoder_decoder"),
            ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], reason: str) -> None:
        with pytest.raises(NotImplementedError, match=f"(?s){reason}.*method='medusa'"):
            layer(**changes)

    def test_nothing_is_fused_that_the_kernel_does_not_do(self) -> None:
        assert not layer().supports_quant_query_input
        assert not layer().fused_output_quant_supported(None)


class TestBackend:
    def why(self, **changes: Any) -> list[str]:
        options: dict[str, Any] = {
            "head_size": 128,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": 16,
            "use_mla": False,
            "has_sink": True,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": DeviceCapability(9, 0),
            "attn_type": AttentionType.DECODER,
            "has_sliding_window": True,
        }
        return TreeAttentionBackend.validate_configuration(**options | changes)

    @pytest.mark.parametrize(
        "changes",
        [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bfloat16"}, {"head_size": 256}],
    )
    def test_taken(self, changes: dict[str, Any]) -> None:
        assert self.why(**changes) == []

    @pytest.mark.parametrize(
        "changes",
        [
            {"head_size": 512},
            {"kv_cache_dtype": "int8_per_token_head"},
            {"kv_cache_dtype": "float16"},
            {"use_mm_prefix": True},
            {"use_non_causal": True},
            {"use_rswa": True},
            {"use_mla": True},
            {"attn_type": AttentionType.ENCODER_ONLY},
            {"device_capability": DeviceCapability(7, 5)},
        ],
    )
    def test_refused(self, changes: dict[str, Any]) -> None:
        assert len(self.why(**changes)) == 1

    def test_it_passes_for_vllms(self) -> None:
        assert TreeAttentionBackend.get_name() == "TRITON_ATTN"


class TestCompaction:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_all_layers(self, dtype: torch.dtype) -> None:
        """Two layouts, and one cache that two layers share: moved once, not twice."""
        blocks, heads = 4, 2
        generator = torch.Generator().manual_seed(0)

        def cache(tokens_first: bool) -> Tensor:
            shape = (blocks, BLOCK, heads, 8) if tokens_first else (blocks, heads, BLOCK, 8)
            made = torch.randn(shape, generator=generator).to(dtype)
            return made.transpose(1, 2) if tokens_first else made

        caches = {"a": cache(False), "b": cache(True), "c": cache(False)}
        caches["shares a"] = caches["a"]
        layers = {name: SimpleNamespace(kv_cache=c, impl=layer()) for name, c in caches.items()}
        layers["apart"] = SimpleNamespace(kv_cache=cache(False), impl=layer())
        slots = torch.tensor(
            [[20, 21, 22, 23, 24, 25], [9, 8, 7, 6, 0, 0], [50, 51, 52, 53, 54, 55]]
        )
        nodes = torch.tensor([[0, 2, 5], [0, 3, 3], [0, 0, 0]])
        accepted = torch.tensor([2, 1, 0])
        for _ in range(2):
            expected = {name: by_slot(c).clone() for name, c in caches.items()}
            untouched = layers["apart"].kv_cache.float()
            for tokens in expected.values():
                tokens[[21, 22, 8]] = tokens[[22, 25, 6]]
            compact_group(layers, list(caches), slots, nodes, accepted)
            for name in caches:
                assert torch.equal(by_slot(layers[name].kv_cache), expected[name])
            assert torch.equal(layers["apart"].kv_cache.float(), untouched)
            for made in layers.values():  # vLLM binds others after profiling
                made.kv_cache = made.kv_cache.clone()
            layers["shares a"].kv_cache = layers["a"].kv_cache
            caches = {name: layers[name].kv_cache for name in caches}


def by_slot(cache: Tensor) -> Tensor:
    return cache.float().transpose(1, 2).flatten(0, 1)


def platform(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = SimpleNamespace(
        is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda", device_name=name
    )
    monkeypatch.setattr("vllm.platforms.current_platform", found)


class TestPlatforms:
    @pytest.mark.parametrize(("name", "on_v2"), [("cpu", False), ("cpu", True), ("cuda", True)])
    def test_taken(self, monkeypatch: pytest.MonkeyPatch, name: str, on_v2: bool) -> None:
        platform(monkeypatch, name)
        compat.refuse_unsupported_platform(on_v2)
        assert compat.on_cuda() == (name == "cuda")

    @pytest.mark.parametrize(
        ("name", "on_v2", "reason"),
        [
            ("cuda", False, "V2 model runner.*VLLM_USE_V2_MODEL_RUNNER"),
            ("rocm", True, "CPU and CUDA.*'rocm'"),
        ],
    )
    def test_refused(
        self, monkeypatch: pytest.MonkeyPatch, name: str, on_v2: bool, reason: str
    ) -> None:
        platform(monkeypatch, name)
        with pytest.raises(MedusaConfigError, match=reason):
            compat.refuse_unsupported_platform(on_v2)

    def test_the_worker(self) -> None:
        assert compat.derives_from(V2_CUDA_WORKER, "vllm.v1.worker.gpu_worker.Worker")
        assert not compat.derives_from(V2_CUDA_WORKER, "vllm.v1.worker.cpu_worker.CPUWorker")
        assert compat.derives_from(V2_CUDA_WORKER, "vllm_medusa.worker.v2.with_trees.WithTrees")


class TestChoice:
    def chosen(self, **arguments: Any) -> Any:
        args = EngineArgs("unused", **arguments)
        choose_triton_attention(args)
        choose_triton_attention(args)  # arguments are used for more than one engine
        return args.attention_backend or args.attention_config.backend

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"attention_backend": "auto"},
            {"attention_backend": "triton_attn"},
            {"attention_backend": AttentionBackendEnum.TRITON_ATTN},
            {"attention_config": {"backend": "TRITON_ATTN"}},
        ],
    )
    def test_triton(self, arguments: dict[str, Any]) -> None:
        chosen = self.chosen(**arguments)
        assert str(getattr(chosen, "name", chosen)).upper() == "TRITON_ATTN"

    @pytest.mark.parametrize(
        "arguments",
        [
            {"attention_backend": "FLASH_ATTN"},
            {"attention_backend": AttentionBackendEnum.FLASHINFER},
            {"attention_config": {"backend": "flex_attention"}},
            {"attention_config": {"backend_per_kind": {"sliding_window": "FLASH_ATTN"}}},
        ],
    )
    def test_others_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(MedusaConfigError, match=r"FLA?.*TRITON_ATTN|FLEX.*TRITON_ATTN"):
            self.chosen(**arguments)
