"""Attention of a tree's newest level over a cache that holds the levels above it.

A drafter with keys of its own expands a tree level by level. Behind the context of each request
its cache holds the nodes expanded so far, level after level, ``queries`` nodes each: scratch. The
queries are the newest level; each sees the context and its own ancestors, whatever lies beside.

    slots    | context .......... | level 1: a b c | level 2: d e f |
    seen by e, whose parent is a:   a . .            . e .
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import Mask, Member, TreeGroup, deal
from vllm_medusa.scorer.layout import CacheLayout
from vllm_medusa.scorer.metadata import AttentionPlan, cache_rows


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
