"""Which requests of a step run together as one padded matrix product.

A group of its own costs a request about twenty operator calls, joining a group costs padding: rows
up to the largest tree, columns up to the longest context. A request joins as long as that is the
cheaper, and as long as the logits of the group stay in the caches. The two constants were chosen by
measuring.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_medusa.scorer.layout import TRANSPOSED_ISAS, CacheLayout

# Logit elements (head x node x key, at 64 channels a head) that cost as much as one more group.
GROUP_COST = 32 * 1024
# Largest padded group, in the same unit: beyond it the logits leave the caches.
GROUP_LIMIT = 1024 * 1024


@dataclass(frozen=True)
class Member:
    """One request of a group; columns are counted from its own first gathered block."""

    index: int  # b
    rows: int  # query rows
    size: int  # own keys
    row: int  # the first query row
    blocks: range  # of the block table
    origin: int  # position of column 0
    left: int  # column of the first key that the root sees
    root: int  # column of the root
    end: int  # column after the last node


@dataclass(frozen=True, eq=False)
class Mask:
    """The columns [lo, hi) in which some row must not look."""

    lo: int
    hi: int
    hidden: Tensor  # bool [requests, 1, nodes, hi - lo]


@dataclass(frozen=True, eq=False)
class TreeGroup:
    """Requests computed together, padded to ``num_nodes`` rows and ``last - first`` columns."""

    num_requests: int
    num_nodes: int
    rows: slice | Tensor  # query rows, num_requests * num_nodes of them; padding repeats a root
    kept: Tensor | None  # int64: the padded rows that are nodes; None: all of them
    out_rows: slice | Tensor  # where the kept rows go
    key_rows: Tensor  # int64, rows of the flat cache (of block_size elements; amx: whole halves)
    value_rows: Tensor  # int64, rows of the flat cache (of head_size elements; amx: whole halves)
    first: int  # columns of the gathered blocks in use
    last: int
    masks: tuple[Mask, ...]  # columns counted from ``first``


def deal(members: list[Member], layout: CacheLayout, num_heads: int) -> list[list[Member]]:
    """Deal the requests into groups, longest first."""
    if len(members) == 1 or layout.isa not in TRANSPOSED_ISAS:
        return [[m] for m in members]
    area = num_heads * layout.head_size / 64
    groups: list[list[Member]] = []
    nodes = columns = 0
    for m in sorted(members, key=lambda m: (m.end - m.left, m.rows), reverse=True):
        width = m.end - m.left
        taller = max(nodes, m.rows)
        if groups:
            count = len(groups[-1])
            padding = taller * columns - m.rows * width + (taller - nodes) * columns * count
            total = (count + 1) * taller * columns
            if padding * area < GROUP_COST and total * area <= GROUP_LIMIT:
                groups[-1].append(m)
                nodes = taller
                continue
        groups.append([m])
        nodes, columns = m.rows, width
    return [sorted(group, key=lambda m: m.row) for group in groups]
