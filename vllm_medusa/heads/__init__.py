"""Medusa and Hydra heads, EAGLE-3 drafters, and their checkpoints.

Names related to checkpoints are imported on first use, so that running heads needs only torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.model import HeadsError, LMHead, MedusaHeads, ResBlock
from vllm_medusa.heads.packed import Linear, MakeLinear, PackedHeads

if TYPE_CHECKING:
    from vllm_medusa.heads.checkpoint import (
        HeadsInfo,
        load_heads,
        peek_heads,
        save_drafter,
        save_heads,
        update_config,
    )
    from vllm_medusa.heads.fingerprint import TargetMatch, match_target, target_fingerprint

__all__ = [
    "HeadsError",
    "HeadsInfo",
    "HydraHeads",
    "LMHead",
    "Linear",
    "MakeLinear",
    "MedusaHeads",
    "PackedHeads",
    "PackedHydra",
    "ResBlock",
    "TargetMatch",
    "load_heads",
    "match_target",
    "peek_heads",
    "save_drafter",
    "save_heads",
    "target_fingerprint",
    "update_config",
]

_HOME = dict.fromkeys(__all__, "checkpoint")
_HOME |= dict.fromkeys(("TargetMatch", "match_target", "target_fingerprint"), "fingerprint")


def __getattr__(name: str) -> Any:
    """Import the names that need safetensors on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
