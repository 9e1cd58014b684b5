"""Trained heads as a checkpoint that says where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.checkpoint import save_drafter, save_heads
from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.training.losses import AnyHeads


@torch.no_grad()
def round_to(heads: AnyHeads, dtype: torch.dtype) -> None:
    """Round every weight to ``dtype``, in place: what is measured then is what will be stored."""
    for parameter in heads.parameters():
        parameter.copy_(parameter.to(dtype))


def save_trained(
    output: Path,
    heads: AnyHeads,  # which end on the CPU in ``dtype``
    source: str | Path,  # the target's folder or hub name
    *,
    dtype: torch.dtype,
    training: Mapping[str, Any],  # settings and accuracies
    target: Mapping[str, Any],  # its fingerprint
    provenance: Mapping[str, Any],  # the entry of this command, the first of the list
) -> None:
    """Write heads in ``dtype``; ``config.json`` comes last and means that they are complete."""
    heads.to(device="cpu", dtype=dtype)
    name = str(source)
    if Path(source).is_absolute():  # a path of this machine says nothing elsewhere
        name = Path(source).name
    config = {
        "base_model_name_or_path": name,
        "target": dict(target),
        "training": dict(training),
        "provenance": [dict(provenance)],
    }
    if isinstance(heads, EagleDrafter):
        save_drafter(output, heads, config)
    else:
        save_heads(output, heads, config)
