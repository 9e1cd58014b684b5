"""Readable fp64 attention from queries, keys, values and a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(
    query: Tensor,  # [n, Hq, D]
    keys: Tensor,  # [L, Hkv, D]
    values: Tensor,  # [L, Hkv, D]
    seen: Tensor,  # bool [n, L]
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
) -> Tensor:
    """Attend the rows of one request to their visible keys; keys that no row sees may be NaN.

    Returns fp64 [n, Hq, D], 0 for a row that sees nothing.
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
    return torch.einsum("nhl,lhd->nhd", weights, values)
