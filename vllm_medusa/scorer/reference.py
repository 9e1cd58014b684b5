"""Readable tree attention in fp64, from queries, keys, values and parents.

It shares no metadata with the fast paths: a node's visible keys are found by following its parents,
so errors in packed bits, depths, tables or plans show up as differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible_keys(context: int, parents: Sequence[int], window: int | None = None) -> Tensor:
    """The keys visible to each row of one request: bool [n, context + n].

    Args:
        context: tokens before the rows; their keys come first.
        parents: of each row, -1 for the root; ``range(-1, n - 1)`` for rows that are not a tree.
        window: position p attends to positions > p - window; None for all.

    """
    seen = torch.zeros(len(parents), context + len(parents), dtype=torch.bool)
    seen[:, :context] = True
    depths: list[int] = []
    for row, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        node = row
        while node >= 0:
            seen[row, context + node] = True
            node = parents[node]
    if window is not None:
        own = context + torch.tensor(depths)  # positions: siblings share one
        seen &= torch.cat((torch.arange(context), own)) > own.unsqueeze(1) - window
    return seen


def attention_reference(
    query: Tensor,  # [n, Hq, D]
    keys: Tensor,  # [L, Hkv, D]
    values: Tensor,  # [L, Hkv, D]
    seen: Tensor,  # bool [n, L]
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
) -> tuple[Tensor, Tensor]:
    """Attend the rows of one request to their visible keys; others may be NaN.

    Returns:
        fp64 [n, Hq, D], 0 for a row that sees nothing, and log(sum(exp(logits))) fp64 [n, Hq],
        sinks included.

    """
    used = seen.any(0)
    group = query.shape[1] // keys.shape[1]
    keys, values = (t[used].double().repeat_interleave(group, 1) for t in (keys, values))
    logits = torch.einsum("nhd,lhd->nhl", query.double(), keys) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen[:, used].unsqueeze(1), float("-inf"))
    total = torch.logsumexp(logits, 2)  # [n, Hq]
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double())
    shift = total.masked_fill(total == float("-inf"), 0.0)
    weights = torch.exp(logits - shift.unsqueeze(2))
    return torch.einsum("nhl,lhd->nhd", weights, values), total
