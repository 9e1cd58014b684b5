"""Attention of a tree's newest level over a cache that holds the levels above it.

A drafter with keys of its own expands a tree level by level. Behind the context of each request
its cache holds the nodes expanded so far, level after level, ``queries`` nodes each: scratch. The
queries are the newest level; each sees the context and its own ancestors, whatever lies beside.

    slots    | context .......... | level 1: a b c | level 2: d e f |
    seen by e, whose parent is a:   a . .            . e .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import Mask, Member, TreeGroup, deal
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.metadata import AttentionPlan, cache_rows
from vllm_medusa.scorer.paged import PagedBatch, SplitWorkspace
from vllm_medusa.tree.packing import num_words, pack_ancestors


@dataclass(frozen=True, eq=False)
class PagedBranches:
    """What `paged` needs to know of the scratch nodes of all requests, in one place for good.

    The nodes are their requests' own rows; the levels above the newest one are `rows_before`.
    """

    ancestor_bits: Tensor  # int64 [most requests, S, W]
    depths: Tensor  # int64 [most requests, S]; windows alone would ask for them
    is_tree: Tensor  # bool [most requests]

    @classmethod
    def allocate(cls, requests: int, size: int, device: torch.device | str) -> PagedBranches:
        """For so many requests and nodes at most."""
        with torch.inference_mode(False):  # else only inference mode could write to it
            return cls(
                torch.zeros(requests, size, num_words(size), dtype=torch.int64, device=device),
                torch.zeros(requests, size, dtype=torch.int64, device=device),
                torch.ones(requests, dtype=torch.bool, device=device),
            )

    def batch(
        self,
        seen: Tensor,  # bool [B, queries, S]: which of the S scratch nodes each query sees
        cu_query_lens: Tensor,  # int32 [B + 1]
        seq_lens: Tensor,  # int32 [B], context and scratch
        block_table: Tensor,  # int32 [B, max_blocks]
        most_queries: int,  # of a request, in any level
        num_splits: int = 1,
        workspace: SplitWorkspace | None = None,
    ) -> PagedBatch:
        """One level; nothing is waited for."""
        (count, queries, size), bits = seen.shape, pack_ancestors(seen)
        self.ancestor_bits[:count, size - queries : size, : bits.shape[2]] = bits
        return PagedBatch(
            cu_query_lens=cu_query_lens,
            seq_lens=seq_lens,
            block_table=block_table,
            is_tree=self.is_tree[:count],
            ancestor_bits=self.ancestor_bits[:count],
            depths=self.depths[:count],
            max_query_len=most_queries,
            num_splits=num_splits,
            workspace=workspace,
            rows_before=size - queries,
        )


def build_branches(
    seen: Tensor,  # bool [B, queries, S]: which of the S scratch nodes each query sees
    base: Tensor,  # int64 [B], context tokens
    block_table: Tensor,  # integer [B, >= ceil((base + S) / block_size)]
    layout: CacheLayout,
    num_heads: int,
) -> AttentionPlan:
    """Plan one level. Query rows follow each other, request by request; all on the CPU."""
    queries, size = seen.shape[1:]
    members = []
    for b, context in enumerate(base.tolist()):
        blocks = range(-(-(context + size) // layout.block_size))
        end = context + size
        members.append(Member(b, size, b * queries, blocks, 0, 0, context, end))
    groups = tuple(
        _group(part, seen, block_table, layout) for part in deal(members, layout, num_heads)
    )
    return AttentionPlan(layout=layout, groups=groups)


def _group(
    members: list[Member], seen: Tensor, block_table: Tensor, layout: CacheLayout
) -> TreeGroup:
    queries, size = seen.shape[1:]
    first, last = 0, max(m.end for m in members)
    key_rows, value_rows = cache_rows(members, first, last, block_table, layout)
    starts = torch.tensor([m.row for m in members])
    rows: slice | Tensor = (starts[:, None] + torch.arange(queries)).flatten()
    if int(starts[-1] - starts[0]) == queries * (len(members) - 1):
        rows = slice(int(starts[0]), int(starts[-1]) + queries)
    lo = min(m.root for m in members)
    node = torch.arange(lo, last) - torch.tensor([m.root for m in members])[:, None]  # [G, C]
    index = node.clamp(0, size - 1).unsqueeze(1).expand(-1, queries, -1)
    hidden = ~seen[[m.index for m in members]].gather(2, index)  # [G, queries, C]
    hidden &= (node >= 0).unsqueeze(1)  # those before are context
    hidden |= (node >= size).unsqueeze(1)
    return TreeGroup(
        num_requests=len(members),
        num_nodes=queries,
        rows=rows,
        kept=None,
        out_rows=rows,
        key_rows=key_rows,
        value_rows=value_rows,
        first=first,
        last=last,
        masks=(Mask(lo - first, last - first, hidden.unsqueeze(1)),),
    )
