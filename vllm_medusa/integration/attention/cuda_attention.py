"""vLLM's Triton attention backend with trees: steps that verify trees use our kernel only.

A step without trees runs exactly vLLM's own path. In a step with trees our kernel attends
for all requests, because it supports mixed trees, plain decodes and prefill; vLLM writes keys
and values in both cases, in its own cache layout. `cuda_metadata` prepares a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_medusa.integration.attention.cuda_metadata import TreeMetadata, TreeMetadataBuilder
from vllm_medusa.kv.kernel import LayerCaches, compact_layers
from vllm_medusa.scorer.launch import paged_tree_attention
from vllm_medusa.scorer.paged import MAX_HEAD_SIZE, PagedBatch

BACKENDS = {"TRITON_ATTN": f"{__name__}.TreeAttentionBackend"}


class TreeAttentionBackend(TritonAttentionBackend):
    """Replaces ``TRITON_ATTN``, without features that trees do not support."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """Layers of this backend."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        """Builder of its metadata."""
        return TreeMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """The sizes that both kernels support."""
        return super().supports_head_size(head_size) and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and later, for which the tile sizes are chosen."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only."""
        return attn_type == AttentionType.DECODER

    # The number of key parts depends on the batch; nodes never attend to later nodes; our kernel
    # does not support ALiBi or windows that exclude the prompt.
    supports_batch_invariance = supports_mm_prefix = classmethod(lambda cls: False)
    supports_non_causal = supports_rswa = supports_alibi_sqrt = classmethod(lambda cls: False)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why this combination is unsupported, or None."""
        plain = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        if plain.get(kv_cache_dtype, dtype) != dtype:
            return (
                f"tree attention supports a KV cache in the model's own {dtype} or in fp8, not in "
                f"{kv_cache_dtype}"
            )
        return None


class TreeAttentionImpl(TritonAttentionImpl):
    """One attention layer."""

    # the caches of a group by shape, after the first layer's; stored in that layer
    group_caches: tuple[Tensor, list[LayerCaches]] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        reasons = {
            "ALiBi": self.alibi_slopes is not None,
            "chunked attention": self.chunk_lookback >= 0,
            f"{AttentionType(self.attn_type).value} attention": self.attn_type
            != AttentionType.DECODER,
        }
        for reason, found in reasons.items():
            if found:
                raise NotImplementedError(
                    f"This model uses {reason}, which tree attention does not support. Omit "
                    "method='medusa'."
                )
        self.supports_quant_query_input = False  # our kernel multiplies in the model's own dtype

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """False: outputs are written in the dtype of the queries."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend: query [T, Hq, D] over ``kv_cache``, which already holds this step's keys."""
        if not isinstance(attn_metadata, TreeMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        assert output_scale is None and output_block_scale is None and attn_metadata.paged
        rows = attn_metadata.num_actual_tokens
        self.attend(layer, query[:rows], kv_cache, attn_metadata.paged, output[:rows])
        return output

    def attend(
        self, layer: Any, query: Tensor, kv_cache: Tensor, batch: PagedBatch, output: Tensor
    ) -> None:
        """Run our kernel into ``output``, shaped like ``query`` [rows, Hq, D]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        k_scale = v_scale = None
        if is_quantized_kv_cache(self.kv_cache_dtype):
            keys, values = keys.view(self.fp8_dtype), values.view(self.fp8_dtype)
            k_scale, v_scale = layer._k_scale, layer._v_scale
        left = self.sliding_window[0]
        paged_tree_attention(
            query,
            keys,
            values,
            batch,
            self.scale,
            out=output,
            softcap=self.logits_soft_cap,
            window=left + 1 if left >= 0 else None,
            sinks=self.sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )


def warm_up(layers: Mapping[str, Any], groups: Iterable[Any], *, branches: bool = False) -> None:
    """Compile all kernels that steps, or a drafter's levels, of these attention groups may need.

    vLLM's own warm-up and captures cover only some of them: their contexts are short, and no batch
    has both trees and prefill.
    """
    for group in groups:
        builder = group.get_metadata_builder()
        assert isinstance(builder, TreeMetadataBuilder)
        batches = builder.empty_batches(branches=branches)
        for name, batch in product(group.layer_names, batches):
            layer = layers[name]
            impl: TreeAttentionImpl = layer.impl
            rows = torch.zeros(
                min(batch.max_query_len, batch.depths.shape[1]), impl.num_heads, impl.head_size,
                dtype=builder.vllm_config.model_config.dtype, device=layer.kv_cache.device,
            )  # fmt: skip
            impl.attend(layer, rows, layer.kv_cache, batch, rows)


def compact_group(
    layers: Mapping[str, Any],
    layer_names: list[str],
    slots: Tensor,  # int64 [B, N], of every node
    path_nodes: Tensor,  # int64 [B, D + 1]
    num_accepted: Tensor,  # int64 [B]
) -> None:
    """Move the accepted paths to contiguous slots in every layer of a KV cache group.

    One launch for all layers of the same shape; no host sync.
    """
    first = layers[layer_names[0]]
    known: tuple[Tensor, list[LayerCaches]] | None = first.impl.group_caches
    if known is None or known[0] is not first.kv_cache:  # vLLM has bound new ones
        by_form: dict[Any, dict[int, Tensor]] = {}  # layers may share a cache
        for name in layer_names:
            cache = layers[name].kv_cache
            form = cache.shape, cache.stride(), cache.dtype, cache.device
            by_form.setdefault(form, {})[cache.data_ptr()] = cache
        all_caches = [LayerCaches.of(list(same.values())) for same in by_form.values()]
        known = first.impl.group_caches = (first.kv_cache, all_caches)
    for caches in known[1]:
        compact_layers(caches, slots, path_nodes, num_accepted)
