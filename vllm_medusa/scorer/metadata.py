"""The plan of one step's tree attention on CPUs: what each layer gathers, hides and writes.

Built once a step and KV cache group on the host; every layer with the same cache layout and
sliding window runs it unchanged. Requests run in groups (`grouping`), each as one padded matrix
product. A request has *own keys*, those of its nodes behind the context, and query rows: all of
its nodes (`build_metadata`), or the newest level of a drafter's tree only (`build_branches`).

Columns. The keys of a request are gathered by whole blocks from the block of the first key that
its root may see, so column c of request b is position ``origin[b] + c``; columns of own keys follow
at ``base[b] - origin[b] + i``. Only columns that some row must not see carry a mask: those about
to leave the sliding window on the left, and own keys with the ragged end on the right.

Unwritten memory. Cache slots past the last node, and blocks padded onto shorter requests, may
hold NaN. Their logits are replaced (masked_fill), never added to, and since 0 * NaN is NaN their
values are never read: such columns gather the value of the request's own root instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import Mask, Member, TreeGroup, deal
from vllm_medusa.scorer.layout import TRANSPOSED_ISAS, CacheLayout
from vllm_medusa.scorer.scratch import Scratch
from vllm_medusa.tree.batch import TreeBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPlan:
    """What the layers of one layout and window run."""

    layout: CacheLayout
    groups: tuple[TreeGroup, ...]
    # (dtype, query heads) -> what the first such layer bound to scratch memory; one entry a group
    scratches: dict[tuple[torch.dtype, int], list[Scratch]] = field(default_factory=dict)


def build_metadata(
    tree: TreeBatch,
    base: Tensor,  # integer [B], context tokens before the root
    block_table: Tensor,  # integer [B, >= ceil((base + num_nodes) / block_size)]
    layout: CacheLayout,
    num_heads: int,
    window: int | None = None,
    row_starts: Tensor | None = None,  # integer [B], query row of each root; None: from row 0 on
) -> AttentionPlan:
    """Plan the verification of trees. All tensors are on the CPU, where reading them is free."""
    if window is not None and window < 1:
        raise ValueError(f"sliding window is {window}; it must be at least 1, or None for none")
    if num_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not fold onto {layout.num_kv_heads} key heads; "
            "the first number must be a multiple of the second"
        )
    starts = tree.cu_num_nodes[:-1] if row_starts is None else row_starts
    sizes = tree.num_nodes.tolist()
    members = _members(base, starts, sizes, sizes, layout.block_size, window)
    plan = _Planner(base.to(torch.int64), block_table, layout, tree.ancestors, tree, window)
    return plan.of(members, num_heads)


def build_branches(
    seen: Tensor,  # bool [B, queries, S]: which of the S scratch nodes each query sees
    base: Tensor,  # int64 [B], context tokens
    block_table: Tensor,  # integer [B, >= ceil((base + S) / block_size)]
    layout: CacheLayout,
    num_heads: int,
) -> AttentionPlan:
    """Plan one level of a drafter's trees. Query rows follow each other, request by request.

    Behind the context the cache holds the nodes expanded so far, level after level; the queries are
    the newest level, and each sees its own ancestors.
    """
    batch, queries, size = seen.shape
    starts = queries * torch.arange(batch)
    members = _members(base, starts, [queries] * batch, [size] * batch, layout.block_size, None)
    return _Planner(base.to(torch.int64), block_table, layout, seen).of(members, num_heads)


def _members(
    base: Tensor, starts: Tensor, rows: list[int], sizes: list[int], block: int, window: int | None
) -> list[Member]:
    members = []
    numbers = zip(base.tolist(), starts.tolist(), rows, sizes, strict=True)
    for b, (context, row, num_rows, size) in enumerate(numbers):
        left = 0 if window is None else max(0, context - window + 1)
        blocks = range(left // block, -(-(context + size) // block))
        origin = blocks.start * block
        root = context - origin
        members.append(
            Member(b, num_rows, size, row, blocks, origin, left - origin, root, root + size)
        )
    return members


@dataclass(frozen=True, eq=False)
class _Planner:
    base: Tensor  # int64 [B]
    block_table: Tensor
    layout: CacheLayout
    seen: Tensor  # bool [B, >= rows, >= own keys]
    tree: TreeBatch | None = None  # of which a window asks the depths
    window: int | None = None

    def of(self, members: list[Member], num_heads: int) -> AttentionPlan:
        groups = tuple(self.group(group) for group in deal(members, self.layout, num_heads))
        return AttentionPlan(layout=self.layout, groups=groups)

    def group(self, members: list[Member]) -> TreeGroup:
        """Plan the rows, gathers and masks of one group."""
        nodes = max(m.rows for m in members)
        first, last = min(m.left for m in members), max(m.end for m in members)
        rows, kept, out_rows = _rows(members, nodes)
        key_rows, value_rows = _cache_rows(members, first, last, self.block_table, self.layout)
        return TreeGroup(
            num_requests=len(members),
            num_nodes=nodes,
            rows=rows,
            kept=kept,
            out_rows=out_rows,
            key_rows=key_rows,
            value_rows=value_rows,
            first=first,
            last=last,
            masks=self._masks(members, nodes, first, last),
        )

    def _masks(self, members: list[Member], nodes: int, first: int, last: int) -> tuple[Mask, ...]:
        """Masks of the columns that not every row of every request sees."""
        alone, own = len(members) == 1, max(m.size for m in members)
        if alone and own == 1:
            return ()  # a lone root sees all that was gathered
        select = torch.tensor([m.index for m in members])
        seen = self.seen[select, :nodes, :own]
        if alone and self.window is None:
            return (Mask(last - own - first, last - first, ~seen.unsqueeze(1)),)
        own_start = min(m.root for m in members)
        all_see = first  # from this column on, every node sees all of its context
        if self.window is not None:
            assert self.tree is not None
            reach = self.tree.max_depth - self.window + 1
            all_see = max(max(m.left, m.root + reach) for m in members)
        spans = [(first, all_see), (own_start, last)]
        if all_see >= own_start:
            spans = [(first, last)]
        origin, sizes = torch.tensor([(m.origin, m.size) for m in members]).T[..., None]
        base = self.base[select, None]
        masks = []
        for lo, hi in spans:
            if lo >= hi:
                continue
            position = origin + torch.arange(lo, hi)  # of context keys; [G, C]
            node = position - base  # < 0 in the context
            clamped = node.clamp(0, own - 1)
            index = clamped.unsqueeze(1).expand(-1, nodes, -1)
            hidden = (node >= 0).unsqueeze(1) & ~seen.gather(2, index)  # [G, nodes, C]
            hidden |= (node >= sizes).unsqueeze(1)
            if self.window is not None and self.tree is not None:
                depths = self.tree.depths[select, :nodes]
                key = torch.where(node < 0, position, base + depths.gather(1, clamped))
                hidden |= key.unsqueeze(1) <= (base + depths - self.window).unsqueeze(2)
            masks.append(Mask(lo - first, hi - first, hidden.unsqueeze(1)))
        return tuple(masks)


def _cache_rows(
    members: list[Member], first: int, last: int, block_table: Tensor, layout: CacheLayout
) -> tuple[Tensor, Tensor]:
    """Rows of the flat cache with the keys [G, H, D, blocks] and the values [G, H, columns]."""
    blocks = _blocks(members, block_table)
    size, dim = layout.block_size, layout.head_size
    head = 2 * torch.arange(layout.num_kv_heads).unsqueeze(1)  # in halves; [H, 1]
    if layout.isa not in TRANSPOSED_ISAS:
        halves = (blocks * (layout.block_stride // layout.half)).unsqueeze(1) + head
        return halves.flatten(), (halves + 1).flatten()
    channel = (head * dim + torch.arange(dim)).unsqueeze(-1)  # [H, D, 1]
    keys = (blocks * (layout.block_stride // size))[:, None, None, :] + channel
    column = torch.arange(first, last).unsqueeze(0)  # [1 or G, C]
    if len(members) > 1:
        left, root, end = torch.tensor([(m.left, m.root, m.end) for m in members]).T[..., None]
        column = torch.where((column >= left) & (column < end), column, root)
    block = torch.div(column, size, rounding_mode="floor")
    token = blocks.gather(1, block) * (layout.block_stride // dim) + (column - block * size)
    values = token.unsqueeze(1) + (head + 1) * size
    return keys.flatten(), values.flatten()


def _blocks(members: list[Member], block_table: Tensor) -> Tensor:
    """Block ids, int64 [G, blocks]; a request with fewer than the group repeats its last."""
    if len(members) == 1:
        (m,) = members
        blocks = block_table[m.index, m.blocks.start : m.blocks.stop].unsqueeze(0)
    else:
        span = torch.arange(max(len(m.blocks) for m in members))
        start = torch.tensor([[m.blocks.start] for m in members])
        stop = torch.tensor([[m.blocks.stop] for m in members])
        blocks = block_table[torch.tensor([m.index for m in members])]
        blocks = blocks.gather(1, torch.minimum(start + span, stop - 1))
    return blocks.to(torch.int64)


def _rows(
    members: list[Member], nodes: int
) -> tuple[slice | Tensor, Tensor | None, slice | Tensor]:
    """Query rows of a group, the padded rows to keep, and where they go."""
    even = all(m.rows == nodes for m in members)
    start = members[0].row
    if even and all(m.row == start + k * nodes for k, m in enumerate(members)):
        rows = slice(start, start + nodes * len(members))
        return rows, None, rows
    root, size = torch.tensor([(m.row, m.rows) for m in members]).T.unsqueeze(-1)
    node = torch.arange(nodes)
    exists = node < size  # [G, nodes]
    padded = (root + node * exists).flatten()
    if even:
        return padded, None, padded
    kept = exists.flatten().nonzero().squeeze(1)
    return padded, kept, padded[kept]
