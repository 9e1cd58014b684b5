"""Scratch memory of the CPU tree attention, kept between layers and steps.

A layer of a small model takes tens of microseconds, as much as forty calls into torch. So every
view into scratch memory that a group needs is made when the step's first layer runs, and the other
layers reuse it: what is left per layer is arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.scorer.grouping import TreeGroup
from vllm_medusa.scorer.layout import TRANSPOSED_ISAS, CacheLayout

# Logits of one pass; above it the key heads of a lone request take turns (fp32: 64 MiB).
PASS_LIMIT = 16 * 1024 * 1024


class Workspace:
    """Memory that grows to the largest step and is then reused."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised contiguous tensor, shared by all that take the same name and dtype."""
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):  # else only inference mode could write to it again
                flat = torch.empty(size + size // 4, dtype=dtype)
            self._flat[name, dtype] = flat
        return flat[:size].view(shape)


@dataclass(frozen=True, eq=False)
class Pass:
    """Key heads that are computed in one go; "heads" below are those of this pass."""

    query: Tensor  # [request and key head, rows, D]
    keys: Tensor  # [request and key head, D, L]
    values: Tensor  # [request and key head, L, D]
    logits: Tensor  # [request and key head, rows, L]
    by_head: Tensor  # the logits as [requests, query heads, nodes, L]
    hidden: tuple[tuple[Tensor, Tensor], ...]  # parts of by_head, and where they are hidden
    result: Tensor  # [request and key head, rows, D]
    key_heads: slice


@dataclass(frozen=True, eq=False)
class Scratch:
    """All views of one group for layers of one query shape and dtype."""

    query: Tensor  # fp32 [requests, query heads, nodes, D]
    key_rows: Tensor  # gathered rows of the cache, in its dtype
    value_rows: Tensor
    casts: tuple[tuple[Tensor, Tensor], ...]  # fp32 target, view of gathered rows
    passes: tuple[Pass, ...]
    result: Tensor  # fp32 [requests, nodes, query heads, D], a view
    macs: int  # multiply-adds of one product


def bind(
    workspace: Workspace, group: TreeGroup, layout: CacheLayout, heads: int, dtype: torch.dtype
) -> Scratch:
    """Lay out the scratch memory of ``group``."""
    requests, nodes, dim = group.num_requests, group.num_nodes, layout.head_size
    batch, rows = requests * layout.num_kv_heads, heads // layout.num_kv_heads * nodes
    length = group.last - group.first
    transposed = layout.isa in TRANSPOSED_ISAS
    widths = (layout.block_size, dim) if transposed else (layout.half, layout.half)
    key_rows = workspace.take("key rows", (len(group.key_rows), widths[0]), dtype)
    value_rows = workspace.take("value rows", (len(group.value_rows), widths[1]), dtype)
    casts = []
    if transposed:
        keys = key_rows.view(batch, dim, -1)[..., group.first : group.last]
        values = value_rows.view(batch, length, dim)
        if dtype != torch.float32:
            casts = [(workspace.take("keys", tuple(keys.shape)), keys)]
            casts.append((workspace.take("values", tuple(values.shape)), values))
            keys, values = casts[0][0], casts[1][0]
    else:  # paired: the cast also brings channels and tokens into order
        pairs, tokens = dim // 2, layout.block_size
        key_parts = key_rows.view(batch, -1, tokens // 16, pairs, 16, 2).permute(0, 3, 5, 1, 2, 4)
        value_parts = value_rows.view(batch, -1, dim // 16, tokens // 2, 16, 2)
        value_parts = value_parts.permute(0, 1, 3, 5, 2, 4)
        casts = [
            (workspace.take("keys", tuple(key_parts.shape)), key_parts),
            (workspace.take("values", tuple(value_parts.shape)), value_parts),
        ]
        keys = casts[0][0].view(batch, dim, -1)[..., group.first : group.last]
        values = casts[1][0].view(batch, -1, dim)[:, group.first : group.last]
    query = workspace.take("query", (requests, heads, nodes, dim))
    result = workspace.take("result", (requests, heads, nodes, dim))
    folded, folded_result = query.view(batch, rows, dim), result.view(batch, rows, dim)
    step = batch
    if requests == 1:
        step = min(batch, max(1, PASS_LIMIT // (rows * length)))
    passes = []
    for lo in range(0, batch, step):
        part = slice(lo, min(lo + step, batch))
        logits = workspace.take("logits", (part.stop - lo, rows, length))
        by_head = logits.view(requests, -1, nodes, length)
        hidden = tuple((by_head[..., m.lo : m.hi], m.hidden) for m in group.masks)
        key_heads = part if requests == 1 else slice(0, layout.num_kv_heads)
        passes.append(
            Pass(
                query=folded[part],
                keys=keys[part],
                values=values[part],
                logits=logits,
                by_head=by_head,
                hidden=hidden,
                result=folded_result[part],
                key_heads=key_heads,
            )
        )
    return Scratch(
        query=query,
        key_rows=key_rows,
        value_rows=value_rows,
        casts=tuple(casts),
        passes=tuple(passes),
        result=result.transpose(1, 2),
        macs=batch * rows * length * dim,
    )
