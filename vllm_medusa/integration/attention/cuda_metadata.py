"""A step's metadata for the Triton attention with trees, and its persistent buffers.

CUDA graphs: vLLM captures full graphs for batches in which every request has the same number of
rows (`AttentionCGSupport.UNIFORM_BATCH`), before any tree was drafted. So
`build_for_cudagraph_capture` builds a batch of trees, truncated or whole, for every size that trees
may have. Everything that a replay reads keeps its address from capture: vLLM's own buffers
(lengths, block table), the trees, and ``is_tree``, which marks requests whose rows are nodes;
`build` updates them, also in steps without trees. Requests that pad a batch have no rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_medusa.integration.startup.eagle_options import beam_of, scratch_of
from vllm_medusa.integration.startup.options import TreeSettings, has_trees, is_eagle
from vllm_medusa.kernels import uses_kernel
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace, TreeBuffers
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.scorer.tiles import FEWEST_SPLITS, LARGEST_BLOCK_M
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.dynamic import Beam

_LENGTH_STEP = 512  # lengths are rounded up to multiples of it, so that `_splits` is mostly cached


@dataclass
class TreeMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step in which some request verifies a tree."""

    paged: PagedBatch | None = None  # never None; a default is required after vLLM's fields


class TreeMetadataBuilder(TritonAttentionMetadataBuilder):
    """Adds the trees to vLLM's metadata; the runner sets `step` during the build."""

    step: TreeStep | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._trees: _Trees | None = None
        if has_trees(vllm_config.speculative_config):
            self._trees = _Trees.of(
                vllm_config, kv_cache_spec, self.num_heads_q, torch.device(device)
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs for uniform batches of whole trees; vLLM's own without trees."""
        if has_trees(vllm_config.speculative_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build vLLM's metadata; if there is a `step`, extended for our kernel."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        trees, step = self._trees, self.step
        if trees is None:
            return plain
        if step is None:
            trees.buffers.is_tree.zero_()  # a graph of trees may be replayed for this batch
            return plain
        trees.write(step.tree)
        return trees.add_to(plain)

    def build_branches(
        self, common: CommonAttentionMetadata, mask: Tensor, base: Tensor, depths: Tensor
    ) -> TreeMetadata:
        """One level of a drafter's trees, after the context.

        ``mask`` bool [B, queries, S], ``depths`` int64 [S].
        """
        plain = super().build(0, common)
        assert self._trees is not None
        return self._trees.add_branches(plain, mask, depths)

    def empty_batches(self, *, branches: bool = False) -> Iterator[PagedBatch]:
        """One batch without rows for each kernel of steps with trees, or of `build_branches`."""
        return iter(()) if self._trees is None else self._trees.empty_batches(branches)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Build the metadata for graph capture: truncated or whole trees, shortest context."""
        plain = super().build_for_cudagraph_capture(common_attn_metadata)
        trees = self._trees
        if trees is None or not 1 < plain.max_query_len <= trees.num_nodes:
            return plain
        trees.buffers.is_tree.fill_(True)
        return trees.add_to(plain)


@dataclass(frozen=True)
class _Shape:
    """Kernel parameters besides the batch: heads of this rank, and dtypes."""

    num_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    def splits(self, batch: int, max_query_len: int, max_seq_len: int) -> int:
        """The best number of key parts."""
        return _splits(self, batch, max_query_len, -(-max_seq_len // _LENGTH_STEP) * _LENGTH_STEP)


@functools.lru_cache(4096)
def _splits(shape: _Shape, batch: int, max_query_len: int, max_seq_len: int) -> int:
    if not uses_kernel(shape.device.type):
        return 1
    from vllm_medusa.scorer.launch import choose_splits

    return choose_splits(batch, max_query_len=max_query_len, max_seq_len=max_seq_len, **vars(shape))


@dataclass(frozen=True, eq=False)
class _Trees:
    """Persistent device buffers shared by all steps of one KV cache group."""

    buffers: TreeBuffers
    static: bool  # one tree for all: the buffers are views of it
    workspace: SplitWorkspace | None  # None: keys are never split
    shape: _Shape
    beam: Beam | None  # of a drafter that attends over its own branches
    branches: TreeBuffers | None

    @classmethod
    def of(cls, vllm_config: Any, spec: Any, num_heads: int, device: torch.device) -> _Trees:
        """Create the buffers; the workspace fits the largest step of whole trees."""
        tree = TreeSettings.of(vllm_config).tree
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        shape = _Shape(
            num_heads, spec.num_kv_heads, spec.head_size, model.dtype, spec.dtype, device
        )
        maximum = 0
        for batch in range(1, scheduler.max_num_seqs + 1):
            splits = shape.splits(batch, tree.num_nodes, model.max_model_len)
            if splits > 1:
                maximum = max(maximum, batch * tree.num_nodes * num_heads * splits)
        workspace = SplitWorkspace.allocate(maximum, spec.head_size, device) if maximum else None
        requests = scheduler.max_num_seqs
        buffers = TreeBuffers.allocate(requests, tree.num_nodes, device, is_tree=False)
        if static := isinstance(tree, TokenTree):
            tensors = TreeTensors.from_tree(tree, device)
            bits, depths = tensors.ancestor_bits, tensors.depths
            bits, depths = bits.expand(requests, -1, -1), depths.expand(requests, -1)
            buffers = TreeBuffers(bits, depths, buffers.is_tree)
        beam = branches = None
        if is_eagle(vllm_config.speculative_config):
            beam = beam_of(tree)
            nodes = max(1, scratch_of(beam))
            branches = TreeBuffers.allocate(requests, nodes, device, is_tree=True)
        return cls(buffers, static, workspace, shape, beam, branches)

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.buffers.depths.shape[1]

    def bound(self, max_query_len: int) -> int:
        """An upper bound of rows per request with only two values, for trees and for prefill.

        Otherwise each size of truncated trees and short chunks would need its own compiled kernel.
        """
        if max_query_len <= self.num_nodes:
            return self.num_nodes
        group = self.shape.num_heads // self.shape.kv_heads  # kernel rows per query row
        return max(max_query_len, -(-LARGEST_BLOCK_M // group))

    def write(self, tree: TreeBatch) -> None:
        """Copy a step's trees into the buffers that CUDA graphs read."""
        buffers = self.buffers
        torch.gt(tree.num_nodes, 1, out=buffers.is_tree[: tree.batch_size])
        if not self.static:  # later entries are stale, and no row attends to them
            batch, nodes, words = tree.ancestor_bits.shape
            buffers.depths[:batch, :nodes] = tree.depths
            buffers.ancestor_bits[:batch, :nodes, :words] = tree.ancestor_bits

    def add_to(self, plain: TritonAttentionMetadata) -> TreeMetadata:
        """The metadata with the trees; ``is_tree`` must be written separately."""
        batch = plain.seq_lens.shape[0]  # padding included
        rows = self.bound(plain.max_query_len)
        table = plain.block_table[:batch]
        splits = self.splits(plain, batch, rows)
        where = plain.query_start_loc, plain.seq_lens, table
        paged = self.buffers.batch(*where, rows, splits, self.workspace)
        return TreeMetadata(**vars(plain), paged=paged)

    def add_branches(
        self, plain: TritonAttentionMetadata, mask: Tensor, depths: Tensor
    ) -> TreeMetadata:
        """The metadata of one level of a drafter's trees; the step's trees are unchanged."""
        assert self.beam is not None and self.branches is not None
        rows, splits = self.beam.width, self.splits(plain, len(mask), self.beam.width)
        where = plain.query_start_loc, plain.seq_lens, plain.block_table
        before = self.branches.write_level(mask, depths)
        paged = self.branches.batch(*where, rows, splits, self.workspace, before)
        return TreeMetadata(**vars(plain), paged=paged)

    def splits(self, plain: TritonAttentionMetadata, batch: int, rows: int) -> int:
        """Number of key parts; prefill may have more rows than the workspace can hold."""
        if self.workspace is None:
            return 1
        room = self.workspace.max_splits(
            plain.num_actual_tokens, self.shape.num_heads, self.shape.head_size
        )
        return min(self.shape.splits(batch, rows, plain.max_seq_len), room)

    def empty_batches(self, branches: bool) -> Iterator[PagedBatch]:
        """One request without rows for each kernel that steps, or a drafter's levels, need.

        A layer called with it compiles its kernels and computes nothing. The number of rows must
        not exceed ``max_query_len`` and the number of nodes.
        """
        buffers, sizes = self.buffers, [self.num_nodes, self.bound(self.num_nodes + 1)]
        if branches:
            assert self.beam is not None and self.branches is not None
            buffers, sizes = self.branches, [self.beam.width]
        zeros = torch.zeros(1, 2, dtype=torch.int32, device=self.shape.device)
        parts, heads = {1}, self.shape.num_heads
        if self.workspace is not None:
            maximum = self.workspace.max_splits(min(sizes), heads, self.shape.head_size)
            merges = (FEWEST_SPLITS << i for i in range(3))  # one kernel each, up to 64
            parts |= {min(n, maximum) for n in merges if n == FEWEST_SPLITS or n // 2 < maximum}
        for rows, splits in product(sizes, parts):
            where = zeros[0], zeros[0, :1], zeros
            yield buffers.batch(*where, rows, splits, self.workspace)
