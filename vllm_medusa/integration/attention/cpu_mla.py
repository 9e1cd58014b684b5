"""vLLM's CPU backends for MLA with trees: our attention for trees, vLLM's for the rest.

A layer passes the first rows of a step to the backend's `forward_mqa`, with the up-projections
absorbed, and the others to `forward_mha`, as prefills. Trees are therefore laid out, and projected,
as vLLM's one-token requests are. Chains too: vLLM's kernels for CPUs decode one token per request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.amx_mla import (
    AMXMLABackend,
    AMXMLAImpl,
    AMXMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from vllm_medusa.integration.attention.cpu_attention import part_of
from vllm_medusa.scorer.latent import LatentPlan, latent_attention
from vllm_medusa.scorer.step import TreeStep


@dataclass
class TreeMLAMetadata(MLACommonMetadata):
    """A step with drafts, or one level of a drafter's trees.

    ``plain`` is vLLM's own metadata of the other requests; ``plain_rows`` are the rows of those
    with one token.
    """

    plan: LatentPlan | None = None  # never None; a default is required after vLLM's fields
    plain: MLACommonMetadata | None = None
    plain_rows: Tensor | None = None  # int64


class TreeMLABuilder(MLACommonMetadataBuilder):
    """Splits a step into trees and the rest; the runner sets `step` during the build."""

    step: TreeStep | None = None
    query_len_support = QueryLenSupport.VARLEN  # the batch starts with the requests that decode

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        """Build vLLM's metadata; if `step` has drafts, only for its other requests."""
        common = common_attn_metadata
        if common.seq_lens_cpu_upper_bound is None:
            common = replace(common, seq_lens_cpu_upper_bound=common.seq_lens)
        step = self.step
        if step is None:
            return self._build_plain(common)
        starts, drafted = common.query_start_loc_cpu.numpy(), step.num_nodes > 1
        rows, requests = np.diff(starts), np.arange(len(drafted))
        # A resumed request with a cached prefix may be between the trees: it is treated as a chain.
        ours = drafted | ((rows > 1) & (requests < np.flatnonzero(drafted)[-1]))
        mask = [
            step.tree.ancestors[request, : rows[request], : rows[request]]
            if drafted[request]
            else torch.ones(rows[request], rows[request], dtype=torch.bool).tril()
            for request in np.flatnonzero(ours)
        ]
        base = common.seq_lens.numpy() - rows
        plan = LatentPlan.of(
            starts[:-1][ours].tolist(),
            base[ours].tolist(),
            mask,
            common.block_table_tensor[torch.from_numpy(ours)],
            self.kv_cache_spec.block_size,
        )
        if ours.all():
            return self._metadata(common, plan)
        part, part_rows = part_of(common, ~ours, starts)
        plain = self._build_plain(part)
        return self._metadata(common, plan, plain, part_rows[: plain.num_decode_tokens])

    def build_branches(
        self, common: CommonAttentionMetadata, mask: Tensor, base: Tensor, depths: Tensor
    ) -> MLACommonMetadata:
        """See `cpu_attention.TreeMetadataBuilder`; there are no windows that need ``depths``."""
        starts = common.query_start_loc_cpu[:-1].tolist()
        table, size = common.block_table_tensor, self.kv_cache_spec.block_size
        return self._metadata(common, LatentPlan.of(starts, base.tolist(), list(mask), table, size))

    def _build_plain(self, common: CommonAttentionMetadata) -> MLACommonMetadata:
        """Build vLLM's metadata, in which only one-token requests decode."""
        threshold, self.reorder_batch_threshold = self.reorder_batch_threshold, 1  # type: ignore[has-type]
        try:
            return super().build(0, common)
        finally:
            self.reorder_batch_threshold = threshold

    def _metadata(
        self,
        common: CommonAttentionMetadata,
        plan: LatentPlan,
        plain: MLACommonMetadata | None = None,
        plain_rows: Tensor | None = None,
    ) -> TreeMLAMetadata:
        prefills = 0 if plain is None else plain.num_prefills
        decodes = common.num_reqs - prefills
        return TreeMLAMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=int(common.query_start_loc_cpu[decodes]),
            num_prefills=prefills,
            prefill=None if plain is None else plain.prefill,
            decode=MLACommonDecodeMetadata(common.block_table_tensor, common.seq_lens, None),
            plan=plan,
            plain=plain,
            plain_rows=plain_rows,
        )


class _TreeImpl(MLACommonImpl):
    """Mixin for an attention layer's implementation."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend queries [T, num_heads, latent + RoPE channels], or a pair of the two parts."""
        own: Any = super()
        kv_cache = kv_c_and_k_pe_cache
        if not isinstance(attn_metadata, TreeMLAMetadata):
            return own.forward_mqa(q, kv_cache, attn_metadata, layer)  # type: ignore[no-any-return]
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        rows = attn_metadata.plain_rows
        if rows is not None and len(rows):
            out[rows] = own.forward_mqa(query[rows], kv_cache, attn_metadata.plain, layer)[0]
        assert attn_metadata.plan is not None
        latent_attention(
            query, kv_cache, attn_metadata.plan, self.kv_lora_rank, self.scale, out,
            round_weights=isinstance(self, AMXMLAImpl),
        )  # fmt: skip
        return out, None


class TreeAMXMLABuilder(TreeMLABuilder, AMXMLAMetadataBuilder):
    """Metadata builder of the AMX backend."""

    step = None


class TreeMLAImpl(_TreeImpl, CPUMLAImpl):
    """One layer of the reference backend."""


class TreeAMXMLAImpl(_TreeImpl, AMXMLAImpl):
    """One layer of the backend for AMX."""


class TreeMLABackend(CPUMLABackend):
    """Replaces ``CPU_MLA``; steps without drafts run vLLM's own code."""

    @staticmethod
    def get_impl_cls() -> type[TreeMLAImpl]:
        """Layers of this backend."""
        return TreeMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMLABuilder]:
        """Builder of its metadata."""
        return TreeMLABuilder


class TreeAMXMLABackend(AMXMLABackend):
    """Replaces ``AMX_MLA``."""

    @staticmethod
    def get_impl_cls() -> type[TreeAMXMLAImpl]:
        """Layers of this backend."""
        return TreeAMXMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAMXMLABuilder]:
        """Builder of its metadata."""
        return TreeAMXMLABuilder
