"""vLLM's CPU attention backend with trees: our kernel for branching trees, vLLM's for the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

from vllm_medusa.kernels import cpu_library
from vllm_medusa.kv import accepted_moves, copy_slots
from vllm_medusa.kv.cpu import PackedCaches
from vllm_medusa.scorer.cpu import (
    AttentionPlan,
    plan_branches,
    plan_trees,
    tree_attention,
)
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.step import TreeStep

BACKENDS = {
    "CPU_ATTN": f"{__name__}.TreeAttentionBackend",
    "CPU_MLA": "vllm_medusa.integration.attention.cpu_mla.TreeMLABackend",
    "AMX_MLA": "vllm_medusa.integration.attention.cpu_mla.TreeAMXMLABackend",
}


# (layout of a layer's cache, its query heads, its window or None); layers of one shape share a plan
MakePlan = Callable[[CacheLayout, int, int | None], AttentionPlan]


@dataclass
class TreeMetadata(CPUAttentionMetadata):
    """Metadata for our kernel: a step with a branching tree, or one level of a drafter's trees.

    ``plain`` is vLLM's own metadata of the other requests, whose token rows are ``plain_rows``: a
    slice if they are contiguous, as a prefill after decoding requests, else an index.
    """

    make_plan: MakePlan | None = None  # never None; a default is required after vLLM's fields
    plain: CPUAttentionMetadata | None = None
    plain_rows: Tensor | slice | None = None  # int64

    @classmethod
    def of(
        cls, common: CommonAttentionMetadata, make_plan: MakePlan, **changes: Any
    ) -> TreeMetadata:
        """Metadata of all rows of ``common``."""
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            make_plan=make_plan,
            **changes,
        )


class TreeMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits a step into trees and the rest; the runner sets `step` during the build."""

    step: TreeStep | None = None
    _had_trees = False  # in the last step

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Build vLLM's metadata; if `step` has branching trees, only for its other requests."""
        step, common = self.step, common_attn_metadata
        if step is None or not step.needs_mask.any():
            self._set_forward(with_trees=False)
            return super().build(common_prefix_len, common, fast_build)
        self._set_forward(with_trees=True)
        is_tree = step.needs_mask
        starts = common.query_start_loc_cpu.numpy()
        plain, rows = None, None
        if not is_tree.all():
            part, index = part_of(common, ~is_tree, starts)
            first, stop = int(index[0]), int(index[-1]) + 1
            rows = slice(first, stop) if stop - first == len(index) else index
            plain = super().build(common_prefix_len, part, fast_build)
        trees = torch.from_numpy(np.flatnonzero(is_tree))
        tree, table = step.tree, common.block_table_tensor
        if len(trees) < len(is_tree):
            tree, table = tree.select(trees), table[trees]
        base = (common.seq_lens - torch.from_numpy(step.num_nodes))[trees]
        row_starts = torch.from_numpy(starts[:-1][is_tree].astype(np.int64))

        @functools.cache
        def plan(layout: CacheLayout, num_heads: int, window: int | None) -> AttentionPlan:
            return plan_trees(tree, base, table, layout, num_heads, window, row_starts)

        return TreeMetadata.of(common, plan, plain=plain, plain_rows=rows)

    def build_branches(
        self, common: CommonAttentionMetadata, mask: Tensor, base: Tensor, depths: Tensor
    ) -> TreeMetadata:
        """One level of a drafter's trees.

        ``mask`` bool [B, queries, S], ``base`` int64 [B], ``depths`` int64 [S].
        """
        self._set_forward(with_trees=True)

        @functools.cache
        def plan(layout: CacheLayout, num_heads: int, window: int | None) -> AttentionPlan:
            table = common.block_table_tensor
            return plan_branches(mask, base, table, layout, num_heads, window, depths)

        return TreeMetadata.of(common, plan)

    @functools.cached_property
    def _impls(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        return [layers[name].impl for name in self.layer_names]

    def _set_forward(self, *, with_trees: bool) -> None:
        """Set the layers' `forward`: `attend` for trees, else vLLM's own method, unwrapped.

        Layers may have several builders, so trees always set it; plain steps must be fast.
        """
        if with_trees or self._had_trees:
            for impl in self._impls:
                if with_trees:
                    impl.forward = impl.attend
                elif "forward" in impl.__dict__:
                    del impl.forward
        self._had_trees = with_trees


def part_of(
    common: CommonAttentionMetadata, chosen: np.ndarray, starts: np.ndarray
) -> tuple[CommonAttentionMetadata, Tensor]:
    """The metadata of a subset of requests, and their token rows, ascending."""
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
        seq_lens_cpu_upper_bound=common.seq_lens[index],
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
    group_caches: Any = None  # of `compact_group`, stored in a group's first layer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None:
            raise NotImplementedError(
                "This model uses ALiBi, which tree attention does not support. Omit "
                "method='medusa'."
            )
        cpu_library()  # fail at start-up without a compiler

    def attend(
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
        if not isinstance(attn_metadata, TreeMetadata):  # a dummy step, without tree metadata
            return type(self).forward(
                self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        rows = attn_metadata.plain_rows
        if rows is not None:
            part = query[rows]
            result = output[rows] if isinstance(rows, slice) else torch.empty_like(part)
            super().forward(
                layer, part, key, value, kv_cache, attn_metadata.plain, result,
                output_scale, output_block_scale,
            )  # fmt: skip
            if isinstance(rows, Tensor):
                output.index_copy_(0, rows, result)
        if self._layout is None:
            self._layout = CacheLayout.of(kv_cache, layer.isa)
        assert attn_metadata.make_plan is not None
        window = self.sliding_window if self.sliding_window > 0 else None
        plan = attn_metadata.make_plan(self._layout, self.num_heads, window)
        tree_attention(
            query, kv_cache, plan, self.scale, self.logits_soft_cap, self.sinks, output,
            truncate=kernel_truncates(),
        )  # fmt: skip
        return output


@functools.cache
def kernel_truncates() -> bool:
    """Whether vLLM's CPU kernel truncates bf16 results instead of rounding to nearest.

    Its builds for CPUs without bf16 instructions do (csrc/cpu/cpu_types_x86.hpp, BF16Vec16). Half
    of all outputs then differ from rounded ones in the last bit, so trees must truncate too.
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
    first = layers[layer_names[0]]
    if first.kv_cache.dim() == 3:  # of MLA: [num_blocks, block_size, width]
        moves = accepted_moves(slots, path_nodes, num_accepted)
        for name in layer_names:
            copy_slots(layers[name].kv_cache, *moves, (0, 1))
        return
    known: tuple[Tensor, int, PackedCaches] | None = first.impl.group_caches
    if known is None or known[0] is not first.kv_cache or known[1] != len(layer_names):
        group = [layers[name] for name in layer_names]
        packed = PackedCaches(
            (layer.kv_cache, CacheLayout.of(layer.kv_cache, layer.isa)) for layer in group
        )
        known = first.impl.group_caches = (first.kv_cache, len(group), packed)
    known[2].compact(slots, path_nodes, num_accepted)
