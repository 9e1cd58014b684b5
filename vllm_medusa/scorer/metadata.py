"""The plan of one step's tree attention: what each layer gathers, hides and writes.

Built once a step and KV cache group on the host; every layer with the same cache layout and
sliding window runs it unchanged. Requests run in groups (`grouping`), each as one padded matrix
product.

Columns. The keys of a request are gathered by whole blocks from the block of the first key that
its root may see, so column c of request b is position ``origin[b] + c``; columns of nodes follow
at ``base[b] - origin[b] + i``. Only columns that some row must not see carry a mask: those about
to leave the sliding window on the left, and the tree with the ragged end on the right.

Memory nobody wrote. Cache slots past the last node, and blocks padded onto shorter requests, may
hold NaN. Their logits are replaced (masked_fill), never added to, and since 0 * NaN is NaN their
values are never read: such columns gather the value of the request's own root instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import Mask, Member, TreeGroup, deal, read_members
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


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeAttentionMetadata(AttentionPlan):
    """One step of one KV cache group."""

    tree: TreeBatch
    base: Tensor  # int64 [B], context tokens before the root
    row_starts: Tensor  # int64 [B], query row of each root
    block_table: Tensor  # integer [B, >= blocks in use]
    window: int | None  # keys at positions > p - window are seen from position p


def build_metadata(
    tree: TreeBatch,
    base: Tensor,  # integer [B]
    block_table: Tensor,  # integer [B, >= ceil((base + num_nodes) / block_size)]
    layout: CacheLayout,
    num_heads: int,
    window: int | None = None,
    row_starts: Tensor | None = None,  # integer [B]; None: trees follow each other from row 0
) -> TreeAttentionMetadata:
    """Plan one step. All tensors on the CPU; reading them as numbers here costs nothing."""
    if window is not None and window < 1:
        raise ValueError(f"sliding window is {window}; it must be at least 1, or None for none")
    if num_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not fold onto {layout.num_kv_heads} key heads; "
            "the first number must be a multiple of the second"
        )
    starts = tree.cu_num_nodes[:-1] if row_starts is None else row_starts
    base64, starts64 = base.to(torch.int64), starts.to(torch.int64)
    members = read_members(tree, base64, starts64, layout.block_size, window)
    builder = _Builder(tree, base64, block_table, layout, window)
    groups = tuple(builder.group(group) for group in deal(members, layout, num_heads))
    return TreeAttentionMetadata(
        layout=layout,
        groups=groups,
        tree=tree,
        base=base64,
        row_starts=starts64,
        block_table=block_table,
        window=window,
    )


@dataclass(frozen=True, eq=False)
class _Builder:
    tree: TreeBatch
    base: Tensor  # int64 [B]
    block_table: Tensor
    layout: CacheLayout
    window: int | None

    def group(self, members: list[Member]) -> TreeGroup:
        """Plan the rows, gathers and masks of one group."""
        nodes = max(m.size for m in members)
        first, last = min(m.left for m in members), max(m.end for m in members)
        rows, kept, out_rows = _rows(members, nodes)
        key_rows, value_rows = cache_rows(members, first, last, self.block_table, self.layout)
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
        alone = len(members) == 1
        if alone and nodes == 1:
            return ()  # a lone root sees all that was gathered
        select = torch.tensor([m.index for m in members])
        ancestors = self.tree.ancestors[select, :nodes, :nodes]
        if alone and self.window is None:
            return (Mask(last - nodes - first, last - first, ~ancestors.unsqueeze(1)),)
        tree_start = min(m.root for m in members)
        all_see = first  # from this column on, every node sees all of its context
        if self.window is not None:
            reach = self.tree.max_depth - self.window + 1
            all_see = max(max(m.left, m.root + reach) for m in members)
        spans = [(first, all_see), (tree_start, last)]
        if all_see >= tree_start:
            spans = [(first, last)]
        origin, size = torch.tensor([(m.origin, m.size) for m in members]).T
        tree = (self.base[select], size, self.tree.depths[select, :nodes], ancestors)
        return tuple(
            Mask(
                lo - first,
                hi - first,
                _hidden(torch.arange(lo, hi), origin, *tree, self.window).unsqueeze(1),
            )
            for lo, hi in spans
            if lo < hi
        )


def cache_rows(
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
    even = all(m.size == nodes for m in members)
    start = members[0].row
    if even and all(m.row == start + k * nodes for k, m in enumerate(members)):
        rows = slice(start, start + nodes * len(members))
        return rows, None, rows
    root, size = torch.tensor([(m.row, m.size) for m in members]).T.unsqueeze(-1)
    node = torch.arange(nodes)
    exists = node < size  # [G, nodes]
    padded = (root + node * exists).flatten()
    if even:
        return padded, None, padded
    kept = exists.flatten().nonzero().squeeze(1)
    return padded, kept, padded[kept]


def _hidden(
    columns: Tensor,  # int64 [C]
    origin: Tensor,  # int64 [G]
    base: Tensor,  # int64 [G]
    sizes: Tensor,  # int64 [G]
    depths: Tensor,  # int64 [G, N]
    ancestors: Tensor,  # bool [G, N, N]
    window: int | None,
) -> Tensor:  # bool [G, N, C]
    """Which columns each node must not see."""
    position = origin[:, None] + columns  # of context keys; [G, C]
    node = position - base[:, None]  # < 0 in the context
    clamped = node.clamp(0, ancestors.shape[1] - 1)
    index = clamped.unsqueeze(1).expand(-1, ancestors.shape[1], -1)
    hidden = (node >= 0).unsqueeze(1) & ~ancestors.gather(2, index)
    hidden |= (node >= sizes[:, None]).unsqueeze(1)
    if window is not None:
        key = torch.where(node < 0, position, base[:, None] + depths.gather(1, clamped))
        query = base[:, None] + depths
        hidden |= key.unsqueeze(1) <= (query - window).unsqueeze(2)
    return hidden
