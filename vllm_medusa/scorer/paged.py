"""Attention over a paged cache for batches that mix trees, plain decodes and prefill chunks.

Request b has ``n = cu_query_lens[b + 1] - cu_query_lens[b]`` query rows. Their keys are in the
cache already, after ``base = seq_lens[b] - n`` tokens of context: row i in slot ``base + i`` of
the request. Position and visible rows of row i:

    request    position of row i         visible rows j
    tree       base + depths[b, i]       j <= i, and bit j of ancestor_bits[b, i] is set
    other      base + i                  j <= i

All of the context is visible too. A sliding window w hides every key whose *position* is at most
that of the query minus w; siblings share a position. A tree request may have fewer rows than
nodes: nodes are parents first, so a prefix is still a tree. Requests without rows are padding
and are skipped, and so are query rows after ``cu_query_lens[-1]``. With ``rows_before`` every
request has that many additional rows at the start: earlier calls wrote their keys, they have no
queries here, and ``base`` is smaller by their number. A row that
sees nothing (only in dummy batches, with seq_len < n) gives zeros.

Slots that no row sees are never read: they may hold NaN, and block table entries after the last
used block, or before the window, may hold anything.

`launch.paged_tree_attention` computes it with a Triton kernel (`kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.tree.ancestors import num_words, pack_ancestors

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, eq=False)
class SplitWorkspace:
    """Memory for partial results: for every row, head and part one normalized output and its LSE.

    Allocated once and reused by every layer and step. The LSEs are natural logarithms of the sum of
    exp(logit), without sinks.
    """

    values: Tensor  # fp32 [capacity * head_size]
    lse: Tensor  # fp32 [capacity]

    @classmethod
    def allocate(cls, capacity: int, head_size: int, device: torch.device | str) -> SplitWorkspace:
        """``capacity`` is the maximum of rows * query heads * parts over all steps."""
        with torch.inference_mode(False):  # otherwise writable only in inference mode
            values = torch.empty(capacity * head_size, dtype=torch.float32, device=device)
            return cls(values, torch.empty(capacity, dtype=torch.float32, device=device))

    def max_splits(self, num_rows: int, num_heads: int, head_size: int) -> int:
        """The max number of parts for a step of ``num_rows`` rows, at least 1."""
        capacity = min(self.lse.numel(), self.values.numel() // head_size)
        return max(1, capacity // max(1, num_rows * num_heads))


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The requests of one step, shared by all layers; every tensor is on the device.

    Only shapes and the integer fields are known on the host. For a static tree ``ancestor_bits``
    and ``depths`` are expanded views (stride 0 over requests).
    """

    cu_query_lens: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B], context plus the rows of this step
    block_table: Tensor  # int32 [B, max_blocks]
    is_tree: Tensor  # bool [B]
    ancestor_bits: Tensor  # int64 [B, N, W]
    depths: Tensor  # integer [B, N]
    max_query_len: int  # upper bound of queries per request; those above it are not written
    num_splits: int = 1  # from `tiles.num_splits`; more than 1 needs the workspace
    workspace: SplitWorkspace | None = None
    rows_before: int = 0  # leading own rows of each request without queries

    def __post_init__(self) -> None:
        batch, nodes, words = self.ancestor_bits.shape
        assert self.cu_query_lens.shape == (batch + 1,) and self.depths.shape == (batch, nodes)
        assert self.seq_lens.shape == self.is_tree.shape == (batch,) == self.block_table.shape[:1]
        assert self.is_tree.dtype == torch.bool and self.ancestor_bits.dtype == torch.int64
        assert words >= num_words(nodes)
        assert self.num_splits == 1 or self.workspace is not None


@dataclass(frozen=True, eq=False)
class TreeBuffers:
    """Persistent trees of all requests of a step: CUDA graphs read them in place."""

    ancestor_bits: Tensor  # int64 [max requests, N, W]
    depths: Tensor  # int64 [max requests, N]
    is_tree: Tensor  # bool [max requests]

    @classmethod
    def allocate(
        cls, requests: int, nodes: int, device: torch.device | str, *, is_tree: bool
    ) -> TreeBuffers:
        """For at most ``requests`` requests with ``nodes`` nodes each."""
        with torch.inference_mode(False):  # otherwise writable only in inference mode
            return cls(
                torch.zeros(requests, nodes, num_words(nodes), dtype=torch.int64, device=device),
                torch.zeros(requests, nodes, dtype=torch.int64, device=device),
                torch.full((requests,), is_tree, device=device),
            )

    def batch(
        self,
        cu_query_lens: Tensor,  # int32 [B + 1]
        seq_lens: Tensor,  # int32 [B]
        block_table: Tensor,  # int32 [B, max_blocks]
        max_query_len: int,
        num_splits: int = 1,
        workspace: SplitWorkspace | None = None,
        rows_before: int = 0,
    ) -> PagedBatch:
        """A step of the first requests; see `PagedBatch`."""
        count = len(seq_lens)
        return PagedBatch(
            cu_query_lens=cu_query_lens,
            seq_lens=seq_lens,
            block_table=block_table,
            is_tree=self.is_tree[:count],
            ancestor_bits=self.ancestor_bits[:count],
            depths=self.depths[:count],
            max_query_len=max_query_len,
            num_splits=num_splits,
            workspace=workspace,
            rows_before=rows_before,
        )

    def write_level(
        self,
        mask: Tensor,  # bool [B, queries, S]: which of the S scratch nodes each query attends to
        depths: Tensor,  # int64 [S] or [B, S], of the scratch nodes
    ) -> int:
        """Write one level of a drafter's trees; returns its `rows_before`. No host sync.

        The scratch nodes are their requests' own rows; only those of the newest level have queries.
        """
        (count, queries, size), bits = mask.shape, pack_ancestors(mask)
        before = size - queries
        self.ancestor_bits[:count, before:size, : bits.shape[2]] = bits
        self.depths[:count, :size] = depths
        return before
