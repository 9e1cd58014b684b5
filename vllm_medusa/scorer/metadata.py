"""The plan of one step's tree attention: what each layer gathers, hides and writes.

Built once a step and KV cache group on the host; every layer with the same cache layout and
sliding window runs it unchanged. Requests are dealt into groups that run as one padded matrix
product: a request joins a group as long as the padding it brings costs less than the operator
calls of a group of its own (see benchmarks/results/tree_attention.md for the two constants).

Columns. The keys of a request are gathered by whole blocks from the block of the first key that
its root may see, so column c of request b is position ``origin[b] + c``; columns of nodes follow
at ``base[b] - origin[b] + i``. Only columns that some row must not see carry a mask: those about
to leave the sliding window on the left, and the tree with the ragged end on the right.

Memory nobody wrote. Cache slots past the last node, and blocks padded onto shorter requests, may
hold NaN. Their logits are replaced (masked_fill), never added to, and since 0 * NaN is NaN their
values are never read: such columns gather the value of the request's own root instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.scorer.layout import TRANSPOSED_ISAS, CacheLayout
from vllm_medusa.tree.batch import TreeBatch

# Logit elements (head x node x key, at 64 channels a head) that cost as much as one more group.
GROUP_COST = 32 * 1024
# Largest padded group, in the same unit: beyond it the logits leave the caches.
GROUP_LIMIT = 1024 * 1024


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


@dataclass(frozen=True, eq=False)
class TreeAttentionMetadata:
    """One step of one KV cache group."""

    tree: TreeBatch
    base: Tensor  # int64 [B], context tokens before the root
    row_starts: Tensor  # int64 [B], query row of each root
    block_table: Tensor  # integer [B, >= blocks in use]
    layout: CacheLayout
    num_heads: int
    window: int | None  # keys at positions > p - window are seen from position p
    groups: tuple[TreeGroup, ...]


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
    sizes: list[int] = tree.num_nodes.tolist()
    bases: list[int] = base64.tolist()
    firsts: list[int] = starts64.tolist()
    lefts = [0 if window is None else max(0, c - window + 1) for c in bases]
    builder = _Builder(tree, base64, block_table, layout, window, sizes, bases, firsts, lefts)
    groups = tuple(builder.group(members) for members in builder.deal(num_heads))
    return TreeAttentionMetadata(
        tree, base64, starts64, block_table, layout, num_heads, window, groups
    )


@dataclass(frozen=True, eq=False)
class _Builder:
    tree: TreeBatch
    base: Tensor  # int64 [B]
    block_table: Tensor
    layout: CacheLayout
    window: int | None
    sizes: list[int]  # nodes of each request
    bases: list[int]
    firsts: list[int]  # query row of each root
    lefts: list[int]  # first position that each root sees

    def deal(self, num_heads: int) -> list[list[int]]:
        """Deal the requests into groups, longest first."""
        requests = range(len(self.sizes))
        if len(self.sizes) == 1 or self.layout.isa not in TRANSPOSED_ISAS:
            return [[b] for b in requests]
        width = [self._columns(b) for b in requests]
        area = num_heads * self.layout.head_size / 64
        groups: list[list[int]] = []
        rows = columns = 0
        paid = 0.0  # padding of the current group so far
        for b in sorted(requests, key=lambda b: (width[b], self.sizes[b]), reverse=True):
            taller = max(rows, self.sizes[b])
            padding = (taller * columns - self.sizes[b] * width[b]) * area
            if groups:
                padding += (taller - rows) * columns * len(groups[-1]) * area
                total = (len(groups[-1]) + 1) * taller * columns * area
                if padding < GROUP_COST and total <= GROUP_LIMIT:
                    groups[-1].append(b)
                    rows, paid = taller, paid + padding
                    continue
            groups.append([b])
            rows, columns, paid = self.sizes[b], width[b], 0.0
        return [sorted(members) for members in groups]

    def group(self, members: list[int]) -> TreeGroup:
        """Plan the rows, gathers and masks of one group."""
        blocks, origins = self._blocks(members)
        nodes = max(self.sizes[b] for b in members)
        ends = [self.bases[b] + self.sizes[b] - o for b, o in zip(members, origins, strict=True)]
        first = min(self.lefts[b] - o for b, o in zip(members, origins, strict=True))
        last = max(ends)
        rows, kept, out_rows = self._rows(members, nodes)
        select = torch.tensor(members)
        key_rows, value_rows = self._cache_rows(select, blocks, origins, ends, first, last)
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
            masks=tuple(self._masks(members, select, origins, nodes, first, last)),
        )

    def _columns(self, b: int) -> int:
        """Columns of request b when it is gathered alone."""
        return self.bases[b] + self.sizes[b] - self.lefts[b]

    def _blocks(self, members: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Gather the block ids, int64 [G, blocks], and the position of each first column.

        A request with fewer blocks than the group repeats its last one.
        """
        size = self.layout.block_size
        starts = [self.lefts[b] // size for b in members]
        lasts = [(self.bases[b] + self.sizes[b] - 1) // size for b in members]
        if len(members) == 1:
            blocks = self.block_table[members[0], starts[0] : lasts[0] + 1].unsqueeze(0)
        else:
            count = max(z - a for a, z in zip(starts, lasts, strict=True)) + 1
            index = torch.tensor(starts).unsqueeze(1) + torch.arange(count)
            index = torch.minimum(index, torch.tensor(lasts).unsqueeze(1))
            blocks = self.block_table[torch.tensor(members)].gather(1, index)
        return blocks.to(torch.int64), [a * size for a in starts]

    def _rows(
        self, members: list[int], nodes: int
    ) -> tuple[slice | Tensor, Tensor | None, slice | Tensor]:
        """Query rows of the group, the padded rows to keep, and where they go."""
        even = all(self.sizes[b] == nodes for b in members)
        start = self.firsts[members[0]]
        if even and all(self.firsts[b] == start + k * nodes for k, b in enumerate(members)):
            rows = slice(start, start + nodes * len(members))
            return rows, None, rows
        first = torch.tensor([self.firsts[b] for b in members]).unsqueeze(1)
        node = torch.arange(nodes).expand(len(members), -1)
        exists = node < torch.tensor([self.sizes[b] for b in members]).unsqueeze(1)
        padded = (first + node * exists).flatten()
        if even:
            return padded, None, padded
        kept = exists.flatten().nonzero().squeeze(1)
        return padded, kept, padded[kept]

    def _cache_rows(
        self,
        select: Tensor,
        blocks: Tensor,  # int64 [G, blocks]
        origins: list[int],
        ends: list[int],
        first: int,
        last: int,
    ) -> tuple[Tensor, Tensor]:
        """Rows of the flat cache that hold the keys and the values, heads outside columns."""
        layout = self.layout
        heads, size, dim = layout.num_kv_heads, layout.block_size, layout.head_size
        head = 2 * torch.arange(heads)
        if layout.isa not in TRANSPOSED_ISAS:
            halves = (blocks * (layout.block_stride // layout.half)).unsqueeze(1) + head[:, None]
            return halves.flatten(), (halves + 1).flatten()
        channel = (head[:, None] * dim + torch.arange(dim)).unsqueeze(-1)  # [H, D, 1]
        keys = (blocks * (layout.block_stride // size))[:, None, None, :] + channel
        column = torch.arange(first, last).expand(len(ends), -1)  # [G, C]
        if len(ends) > 1:
            left = torch.tensor([self.lefts[b] - o for b, o in self._pairs(select, origins)])
            root = torch.tensor([self.bases[b] - o for b, o in self._pairs(select, origins)])
            written = (column >= left[:, None]) & (column < torch.tensor(ends)[:, None])
            column = torch.where(written, column, root[:, None])
        block = torch.div(column, size, rounding_mode="floor")
        token = blocks.gather(1, block) * (layout.block_stride // dim) + (column - block * size)
        values = token.unsqueeze(1) + ((head + 1) * size).unsqueeze(-1)  # [G, H, C]
        return keys.flatten(), values.flatten()

    def _pairs(self, select: Tensor, origins: list[int]) -> list[tuple[int, int]]:
        return list(zip(select.tolist(), origins, strict=True))

    def _masks(
        self,
        members: list[int],
        select: Tensor,
        origins: list[int],
        nodes: int,
        first: int,
        last: int,
    ) -> list[Mask]:
        """Masks of the columns that not every row of every request sees."""
        alone = len(members) == 1
        if alone and nodes == 1:
            return []  # a lone root sees all that was gathered
        ancestors = self.tree.ancestors[select, :nodes, :nodes]
        if alone and self.window is None:
            hidden = ~ancestors.unsqueeze(1)
            return [Mask(last - nodes - first, last - first, hidden)]
        tree_start = min(self.bases[b] - o for b, o in self._pairs(select, origins))
        seen_by_all = first
        if self.window is not None:
            deepest = self.tree.max_depth
            # left of this column (exclusive) a node may have lost sight of the context
            seen_by_all = max(
                max(self.lefts[b], self.bases[b] + deepest - self.window + 1) - o
                for b, o in self._pairs(select, origins)
            )
        if seen_by_all >= tree_start:
            spans = [(first, last)]
        else:
            spans = [(a, z) for a, z in ((first, seen_by_all), (tree_start, last)) if a < z]
        origin = torch.tensor(origins)
        sizes = torch.tensor([self.sizes[b] for b in members])
        depths = self.tree.depths[select, :nodes]
        base = self.base[select]
        masks = []
        for a, z in spans:
            hidden = _hidden(
                torch.arange(a, z), origin, base, sizes, depths, ancestors, self.window
            )
            masks.append(Mask(a - first, z - first, hidden.unsqueeze(1)))
        return masks


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
