"""Draft trees: shapes, ancestor bits, batches. Knows no model, no token, no vLLM.

`TreeBatch` and `TreeTensors` are imported on first use, so that reading a configuration needs no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_medusa.tree.forms import FORMS, TreeValue, read_tree
from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset, preset_names
from vllm_medusa.tree.topology import MAX_NODES, TokenTree, TreeError

if TYPE_CHECKING:
    from vllm_medusa.tree.batch import TreeBatch, TreeTensors

__all__ = [
    "DEFAULT_TREE",
    "FORMS",
    "MAX_NODES",
    "TokenTree",
    "TreeBatch",
    "TreeError",
    "TreeTensors",
    "TreeValue",
    "load_preset",
    "preset_names",
    "read_tree",
]


def __getattr__(name: str) -> Any:
    """Import the names that need torch when they are first asked for."""
    if name not in ("TreeBatch", "TreeTensors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_medusa.tree import batch

    return getattr(batch, name)
