"""Medusa and Hydra heads, EAGLE-3 drafters, and their checkpoints.

Names related to checkpoints are imported on first use, so that running heads needs only torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.model import HeadsError, MedusaHeads
from vllm_medusa.heads.packed import Linear, PackedHeads

if TYPE_CHECKING:
    from vllm_medusa.heads.checkpoint import (
        HeadsInfo,
        load_heads,
        peek_heads,
        save_heads,
        update_config,
    )
    from vllm_medusa.heads.fingerprint import match_target, target_fingerprint

__all__ = [
    "HeadsError",
    "HeadsInfo",
    "HydraHeads",
    "Linear",
    "MedusaHeads",
    "PackedHeads",
    "PackedHydra",
    "load_heads",
    "match_target",
    "peek_heads",
    "save_heads",
    "target_fingerprint",
    "update_config",
]

_HOME = dict.fromkeys(__all__, "checkpoint")
_HOME |= dict.fromkeys(("match_target", "target_fingerprint"), "fingerprint")


def __getattr__(name: str) -> Any:
    """Import the names that need safetensors on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
