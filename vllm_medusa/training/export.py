"""Trained heads as a checkpoint that says where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads


@torch.no_grad()
def round_to(heads: MedusaHeads, dtype: torch.dtype) -> None:
    """Round every weight to ``dtype``, in place: what is measured then is what will be stored."""
    for parameter in heads.parameters():
        parameter.copy_(parameter.to(dtype))


def save_trained(
    output: Path,
    heads: MedusaHeads,
    source: str | Path,
    *,
    dtype: torch.dtype,
    training: Mapping[str, Any],
    target: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Write heads in ``dtype``; ``config.json`` comes last and means that they are complete.

    Args:
        output: the folder.
        heads: the heads, which are left as they are.
        source: the target's folder or hub name.
        dtype: what is stored.
        training: settings and accuracies.
        target: its fingerprint.
        provenance: the entry of this command, the first of the list.

    """
    stored = MedusaHeads(
        heads.num_heads,
        heads.num_layers,
        heads.hidden_size,
        heads.vocab_size,
        bias=heads.has_bias,
        shared_lm_head=heads.shared_lm_head,
        lm_head_bias=heads.lm_head_bias is not None,
        token_map=heads.token_map,
        num_lm_heads=heads.num_lm_heads,
        device="cpu",
        dtype=dtype,
    )
    stored.load_state_dict(heads.state_dict())
    name = str(source)
    if Path(source).is_absolute():  # a path of this machine says nothing elsewhere
        name = Path(source).name
    save_heads(
        output,
        stored,
        {
            "base_model_name_or_path": name,
            "target": dict(target),
            "training": dict(training),
            "provenance": [dict(provenance)],
        },
    )
