"""Draft trees: shapes, ancestor bits, batches. Knows no model, no token, no vLLM.

The names here need no torch; tensors live in `vllm_medusa.tree.batch` and `.packing`.
"""

from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset, preset_names
from vllm_medusa.tree.topology import MAX_NODES, TokenTree, TreeError

__all__ = ["DEFAULT_TREE", "MAX_NODES", "TokenTree", "TreeError", "load_preset", "preset_names"]
