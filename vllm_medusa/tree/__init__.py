"""Draft trees: shapes, tensors, drafted batches. Independent of models and vLLM.

`tree.batch` and `tree.draft_trees` import torch; this module does not.
"""

from vllm_medusa.tree.forms import FORMS, TreeValue, read_tree
from vllm_medusa.tree.presets import DEFAULT_TREE, load_preset, preset_names
from vllm_medusa.tree.topology import MAX_NODES, TokenTree, TreeError

__all__ = [
    "DEFAULT_TREE",
    "FORMS",
    "MAX_NODES",
    "TokenTree",
    "TreeError",
    "TreeValue",
    "load_preset",
    "preset_names",
    "read_tree",
]
