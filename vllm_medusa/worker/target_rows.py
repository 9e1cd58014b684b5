"""The target's LM head over a draft vocabulary, read once when the heads are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from vllm_medusa.heads import MedusaHeads

_CHANNELS = 64  # read at a time


@torch.no_grad()
def store_target_rows(
    heads: MedusaHeads, target: Any, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Store the rows of the draft vocabulary in heads that share the target's LM head.

    The logits of unit vectors are the LM head's columns, however the target keeps its rows: cut
    over ranks, packed or quantised, its logits scaled or biased. A soft cap is not in the rows: it
    is returned, as it acts on logits of theirs.
    """
    assert heads.token_map is not None
    size, token_map = heads.hidden_size, heads.token_map.to(device)
    with _without_soft_cap(target) as soft_cap:
        zero = torch.zeros(1, size, dtype=dtype, device=device)
        bias = target.compute_logits(zero)[0, token_map].float()
        columns = [
            target.compute_logits(unit)[:, token_map].float() - bias
            for unit in torch.eye(size, dtype=dtype, device=device).split(_CHANNELS)
        ]
    weight = torch.cat(columns).T.to(heads.token_map.device, dtype).contiguous()
    heads.store_lm_head(weight, bias.to(weight) if bool(bias.any()) else None)
    return soft_cap


@contextmanager
def _without_soft_cap(target: nn.Module) -> Iterator[float | None]:
    """Leave the cap c of ``c * tanh(logits / c)`` out within the block, which is given it."""
    capped = [
        (module, module.soft_cap)
        for module in target.modules()
        if isinstance(module, LogitsProcessor) and module.soft_cap is not None
    ]
    for processor, _ in capped:
        processor.soft_cap = None
    try:
        yield next((cap * processor.scale for processor, cap in capped), None)
    finally:
        for processor, cap in capped:
            processor.soft_cap = cap
