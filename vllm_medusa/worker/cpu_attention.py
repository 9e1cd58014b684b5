"""vLLM's CPU attention backend with trees: our kernel for branching trees, vLLM's for the rest.

Chains use vLLM's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_medusa.kv.packed import compact_packed
from vllm_medusa.scorer.cpu import (
    AttentionPlan,
    kernel,
    plan_branches,
    plan_trees,
    tree_attention,
)
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree.batch import TreeBatch


@dataclass
class TreeMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step in which some request verifies a tree with branches.

    ``plain`` is vLLM's own metadata of the other requests, whose token rows are ``plain_rows``.
    """

    tree: TreeBatch | None = None  # of those requests
    base: Tensor | None = None  # int64 [trees], context tokens before each root
    row_starts: Tensor | None = None  # int64 [trees], token row of each root
    plain: CPUAttentionMetadata | None = None
    plain_rows: Tensor | None = None  # int64
    plans: dict[tuple[CacheLayout, int, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, layout: CacheLayout, num_heads: int, window: int) -> AttentionPlan:
        """The plan shared by all layers of one shape; built by the first."""
        key = (layout, num_heads, window)
        if key not in self.plans:
            self.plans[key] = self._plan(layout, num_heads, window if window > 0 else None)
        return self.plans[key]

    def _plan(self, layout: CacheLayout, num_heads: int, window: int | None) -> AttentionPlan:
        assert self.tree is not None and self.base is not None
        return plan_trees(
            self.tree, self.base, self.block_table, layout, num_heads, window, self.row_starts
        )


@dataclass
class BranchMetadata(TreeMetadata):
    """A drafter's metadata of one level of its trees, see `scorer.cpu.plan_branches`."""

    seen: Tensor | None = None  # bool [B, queries, S]

    def _plan(self, layout: CacheLayout, num_heads: int, window: int | None) -> AttentionPlan:
        assert self.seen is not None and self.base is not None and window is None
        return plan_branches(self.seen, self.base, self.block_table, layout, num_heads)


class TreeMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a step into trees and the rest; the runner sets `step` during the build."""

    step: TreeStep | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Build vLLM's metadata; with a `step`, for its plain requests only."""
        step, common = self.step, common_attn_metadata
        if step is None or not step.branches.any():
            return super().build(common_prefix_len, common, fast_build)
        is_tree = step.branches
        starts = common.query_start_loc_cpu.numpy()
        plain, rows = None, None
        if not is_tree.all():
            part, rows = _part(common, ~is_tree, starts)
            plain = super().build(common_prefix_len, part, fast_build)
        trees = torch.from_numpy(np.flatnonzero(is_tree))
        whole = len(trees) == len(is_tree)
        num_nodes = torch.from_numpy(step.num_nodes)
        return TreeMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor if whole else common.block_table_tensor[trees],
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            tree=step.tree if whole else step.tree.select(trees),
            base=(common.seq_lens - num_nodes)[trees],
            row_starts=torch.from_numpy(starts[:-1][is_tree].astype(np.int64)),
            plain=plain,
            plain_rows=rows,
        )

    def build_branches(
        self, common: CommonAttentionMetadata, seen: Tensor, base: Tensor
    ) -> BranchMetadata:
        """One level of a drafter's trees: ``seen`` bool [B, queries, S], ``base`` int64 [B]."""
        return BranchMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            base=base,
            seen=seen,
        )


def _part(
    common: CommonAttentionMetadata, chosen: np.ndarray, starts: np.ndarray
) -> tuple[CommonAttentionMetadata, Tensor]:
    """The metadata of a subset of requests, and their token rows."""
    requests = np.flatnonzero(chosen)
    lengths = starts[requests + 1] - starts[requests]
    cu = torch.from_numpy(np.concatenate(([0], lengths.cumsum())).astype(np.int32))
    rows = np.repeat(starts[requests] - cu[:-1].numpy(), lengths) + np.arange(int(cu[-1]))
    index = torch.from_numpy(requests)
    part = replace(
        common,
        query_start_loc=cu,
        query_start_loc_cpu=cu,
        seq_lens=common.seq_lens[index],
        num_reqs=len(requests),
        num_actual_tokens=int(cu[-1]),
        max_query_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[index],
    )
    return part, torch.from_numpy(rows.astype(np.int64))


class TreeAttentionBackend(CPUAttentionBackend):
    """Replaces ``CPU_ATTN``; steps without trees run vLLM's own code."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """Layers of this backend."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        """Builder of its metadata."""
        return TreeMetadataBuilder


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """One attention layer."""

    _layout: CacheLayout | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None:
            raise NotImplementedError(
                "This model uses ALiBi, which tree attention does not support. Omit "
                "method='medusa'."
            )
        kernel()  # fail at start-up without a compiler

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
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
        rows = attn_metadata.plain_rows
        if rows is not None:
            part = query[rows]
            result = torch.empty_like(part)
            super().forward(
                layer, part, key, value, kv_cache, attn_metadata.plain, result,
                output_scale, output_block_scale,
            )  # fmt: skip
            output.index_copy_(0, rows, result)
        if self._layout is None:
            self._layout = CacheLayout.of(kv_cache, layer.isa)
        plan = attn_metadata.plan(self._layout, self.num_heads, self.sliding_window)
        tree_attention(
            query, kv_cache, plan, self.scale, self.logits_soft_cap, self.sinks, output,
            truncate=kernel_truncates(),
        )  # fmt: skip
        return output


@functools.cache
def kernel_truncates() -> bool:
    """Whether vLLM's CPU kernel truncates bf16 results instead of rounding to nearest.

    Its builds for CPUs without bf16 instructions do (csrc/cpu/cpu_types_x86.hpp, BF16Vec16). Half
    of all outputs then differ from rounded ones in the last bit, so trees must do the same.
    """
    length, size, block = 3, 32, 32  # tokens of equal weight: the result is their mean
    values = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-7]).bfloat16().view(length, 1, 1)
    values = values.expand(length, 1, size).contiguous()
    cache = torch.zeros(1, 1, 2 * block, size, dtype=torch.bfloat16)
    keys, rest = cache.chunk(2, dim=2)
    query = torch.zeros(1, 1, size, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    lengths, starts = torch.tensor([length], dtype=torch.int32), torch.tensor([0, 1]).int()
    ops.cpu_attn_reshape_and_cache(
        torch.zeros_like(values), values, keys, rest, torch.arange(length), "vec"
    )
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=1, num_kv_heads=1, head_dim=size, seq_lens=lengths,
        dtype=torch.bfloat16, query_start_loc=starts, causal=True, sliding_window_size=-1,
        isa="vec", enable_kv_split=False,
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query=query, key_cache=keys, value_cache=rest, output=out, query_start_loc=starts,
        seq_lens=lengths, scale=1.0, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.zeros(1, 1, dtype=torch.int32), softcap=0.0, scheduler_metadata=plan,
        s_aux=None,
    )  # fmt: skip
    return bool((out == 1).all())


def compact_group(
    layers: Mapping[str, Any],
    layer_names: list[str],
    slots: Tensor,  # int64 [B, N], of every node
    path_nodes: Tensor,  # int64 [B, D + 1]
    num_accepted: Tensor,  # int64 [B]
) -> None:
    """Move the accepted paths to contiguous slots in every layer of a KV cache group."""
    group = (layers[name] for name in layer_names)
    caches = ((layer.kv_cache, CacheLayout.of(layer.kv_cache, layer.isa)) for layer in group)
    compact_packed(caches, slots, path_nodes, num_accepted)
