"""A step's drafts for any kind of heads and trees, batched; used by `decode.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.proposer import draft
from vllm_medusa.proposer.build import Branching, Marginal, build_tree, fill_tree
from vllm_medusa.proposer.steps import HydraStep, MedusaStep
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.drafts import DraftTrees
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.topology import MAX_NODES, TokenTree


def propose_tree(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [B, H], as for `proposer.draft`
    root: Tensor,  # int64 [B], the last sampled tokens
    tree: TokenTree | DynamicTree,
    lm_head: LMHead | None = None,
    useful_depth: int = MAX_NODES,  # max depth of dynamic trees
) -> DraftTrees:
    """Draft; Hydra heads must have the target's embedding bound. No host sync."""
    device = hidden_states.device
    sharpness = getattr(tree, "sharpness", None)
    factors = None if sharpness is None else torch.tensor(sharpness, device=device)
    step: Marginal | Branching = MedusaStep(heads, hidden_states, lm_head, factors)
    if isinstance(heads, HydraHeads):
        step = HydraStep(heads, hidden_states, heads.embed, lm_head, factors)
    if isinstance(tree, DynamicTree):
        useful = torch.full((len(root),), useful_depth, device=device)
        return build_tree(step, source_on(tree, device), root, tree.num_nodes, useful)
    tensors = tensors_on(tree, device)
    if isinstance(step, HydraStep):
        return DraftTrees.static(tensors, fill_tree(step, tree, root))
    return DraftTrees.static(tensors, draft(heads, hidden_states, tensors, lm_head))


def source_on(tree: DynamicTree, device: torch.device) -> TreeTensors | Beam:
    """The candidate source of `build_tree`, on ``device``."""
    return tree.pool if isinstance(tree.pool, Beam) else tensors_on(tree.pool, device)


@functools.lru_cache(maxsize=8)
def tensors_on(tree: TokenTree, device: torch.device) -> TreeTensors:
    """The tree on ``device``, cached."""
    return TreeTensors.from_tree(tree, device)
