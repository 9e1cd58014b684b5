"""The CUDA attention without an engine: a layer, supported settings, compaction.

Our kernels are replaced by torch here; an engine that runs them is in
``tests/integration/test_triton_engine.py``.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention import visible_keys
from support.in_torch import attention_reference, compact_layers_torch, paged_tree_attention_torch
from torch import Tensor

pytest.importorskip("vllm")
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
    layer,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType

from vllm_medusa.integration.attention import cuda_attention
from vllm_medusa.integration.attention.cuda_attention import TreeAttentionBackend, compact_group

CHUNK = range(-1, 4)  # the parents of its rows


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch):
    monkeypatch.setattr(cuda_attention, "paged_tree_attention", paged_tree_attention_torch)
    monkeypatch.setattr(cuda_attention, "compact_layers", compact_layers_torch)


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
    def test_attention(self, make_builder, changes):
        """One tree and one chunk of prefill against the reference.

        fp32 sums in another order: 1e-5.
        """
        metadata = build(make_builder(), Buffers().batch([(NODES, 21), (5, 12)]), [NODES, 1])
        generator = torch.Generator().manual_seed(3)
        cache = torch.randn(MAX_SEQS * 8, KV_HEADS, BLOCK, 2 * DIM, generator=generator)
        kv_cache, factors = cache, (1.0, 1.0)
        if "kv_cache_dtype" in changes:
            factors = (0.7, 1.3)
            stored = cache.to(torch.float8_e4m3fn)
            kv_cache, cache = stored.view(torch.uint8), stored.float()
        scales = [torch.tensor(factor) for factor in factors]
        scales = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
        query = torch.randn(NODES + 5, HEADS, DIM, generator=generator)
        out = torch.full((NODES + 5 + 2, HEADS, DIM), torch.nan)  # more rows than the step has
        padded = torch.cat((query, query[:2]))
        impl = layer(**changes)
        result = impl.forward(scales, padded, query, query, kv_cache, metadata, out)
        assert result is out
        assert out[NODES + 5 :].isnan().all()

        tokens = cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, 2 * size], by slot
        window, chunk = changes.get("sliding_window"), 8 * BLOCK  # slot of the other's token 0
        for rows, slots, seen in (
            (slice(NODES), slice(21 + NODES), visible_keys(21, TREE.parents, window)),
            (slice(NODES, NODES + 5), slice(chunk, chunk + 17), visible_keys(12, CHUNK, window)),
        ):
            keys, values = tokens[slots].double().split(DIM, -1)
            expected = attention_reference(
                query[rows], keys * factors[0], values * factors[1], seen, 0.3,
                changes.get("logits_soft_cap", 0.0), changes.get("sinks"),
            )  # fmt: skip
            assert (out[rows] - expected).abs().max() < 1e-5

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"alibi_slopes": [0.1] * HEADS}, "ALiBi"),
            ({"chunk_lookback": 1}, "chunked"),
            ({"attn_type": AttentionType.ENCODER_DECODER}, "encoder_decoder"),
            ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ],
    )
    def test_refused(self, changes, reason):
        with pytest.raises(NotImplementedError, match=f"(?s){reason}.*method='medusa'"):
            layer(**changes)

    def test_unsupported_fusions_are_disabled(self):
        assert not layer().supports_quant_query_input
        assert not layer().fused_output_quant_supported(None)


class TestBackend:
    def why(self, **changes: Any) -> list[str]:
        options = {
            "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
            "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
            "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
            "attn_type": AttentionType.DECODER, "has_sliding_window": True,
        }  # fmt: skip
        return TreeAttentionBackend.validate_configuration(**options | changes)

    def test_supported_settings(self):
        for changes in (
            {},
            {"head_size": 256},
            *({"kv_cache_dtype": t} for t in ("fp8", "bfloat16")),
        ):
            assert self.why(**changes) == []
        for changes in (
            {"head_size": 512},
            {"kv_cache_dtype": "int8_per_token_head"},
            {"kv_cache_dtype": "float16"},
            *({f"use_{name}": True} for name in ("mm_prefix", "non_causal", "rswa", "mla")),
            {"use_batch_invariant": True},
            {"attn_type": AttentionType.ENCODER_ONLY},
            {"device_capability": DeviceCapability(7, 5)},
        ):
            assert len(self.why(**changes)) == 1, changes

    def test_it_has_vllms_backend_name(self):
        assert TreeAttentionBackend.get_name() == "TRITON_ATTN"


class TestCompaction:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_all_layers(self, dtype):
        """Two layouts, and one cache shared by two layers: moved once, not twice."""
        blocks, heads = 4, 2
        generator = torch.Generator().manual_seed(0)

        def cache(tokens_first):
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
            for made in layers.values():  # vLLM binds new ones after profiling
                made.kv_cache = made.kv_cache.clone()
            layers["shares a"].kv_cache = layers["a"].kv_cache
            caches = {name: layers[name].kv_cache for name in caches}


def by_slot(cache: Tensor) -> Tensor:
    return cache.float().transpose(1, 2).flatten(0, 1)
