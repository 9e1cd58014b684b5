"""Medusa tree speculative decoding for vLLM.

With this package installed next to vLLM, ``LLM(model=..., speculative_config={"method": "medusa",
"model": HEADS})`` drafts a tree of tokens with the heads and verifies it in one forward pass. The
names below are for use without vLLM; they are imported on first use, so that importing the package
loads neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_medusa.config import AcceptanceConfig, MedusaConfig
    from vllm_medusa.decode import decode
    from vllm_medusa.heads.checkpoint import load_heads, save_heads
    from vllm_medusa.heads.model import MedusaHeads
    from vllm_medusa.tree.presets import load_preset, preset_names
    from vllm_medusa.tree.topology import TokenTree

__version__ = "0.2.0"

_HOME = {
    "AcceptanceConfig": "vllm_medusa.config",
    "MedusaConfig": "vllm_medusa.config",
    "MedusaHeads": "vllm_medusa.heads.model",
    "TokenTree": "vllm_medusa.tree.topology",
    "decode": "vllm_medusa.decode",
    "load_heads": "vllm_medusa.heads.checkpoint",
    "load_preset": "vllm_medusa.tree.presets",
    "preset_names": "vllm_medusa.tree.presets",
    "save_heads": "vllm_medusa.heads.checkpoint",
}

__all__ = [
    "AcceptanceConfig",
    "MedusaConfig",
    "MedusaHeads",
    "TokenTree",
    "__version__",
    "decode",
    "load_heads",
    "load_preset",
    "preset_names",
    "save_heads",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
