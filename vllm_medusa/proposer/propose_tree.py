"""A step's drafts for any kind of heads and trees, batched; used by `decode.py`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.noise import Noise, Stream
from vllm_medusa.proposer import propose
from vllm_medusa.proposer.build import build_tree, fill_tree
from vllm_medusa.proposer.steps import HydraStep, MedusaStep
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.draft_trees import DraftTrees
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.topology import MAX_NODES, TokenTree


def propose_tree(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [B, H], at the position whose next token is the root
    root: Tensor,  # int64 [B], the last sampled tokens
    tree: TokenTree | DynamicTree,
    lm_head: LMHead | None = None,
    useful_depth: int = MAX_NODES,  # max depth of dynamic trees
    stream: Stream | None = None,  # the noise of the next tokens, of requests that sample
) -> DraftTrees:
    """Draft; Hydra heads must have the target's embedding bound. No host sync."""
    device = hidden_states.device
    noise = None
    if stream is not None:
        ids = heads.token_map
        ids = torch.arange(heads.vocab_size, device=device) if ids is None else ids
        noise = Noise(stream, ids)
    sharpness = getattr(tree, "sharpness", None)
    factors = None if sharpness is None else torch.tensor(sharpness, device=device)
    step: MedusaStep | HydraStep = MedusaStep(heads, hidden_states, lm_head, factors, noise=noise)
    if isinstance(heads, HydraHeads):
        step = HydraStep(heads, hidden_states, heads.embed, lm_head, factors, noise=noise)
    if isinstance(tree, DynamicTree):
        useful = torch.full((len(root),), useful_depth, device=device)
        return build_tree(step, source_on(tree, device), root, tree.num_nodes, useful)
    tensors = tensors_on(tree, device)
    if isinstance(step, HydraStep):
        return DraftTrees.static(tensors, fill_tree(step, tree, root))
    scores = step.scores(tensors.max_depth)
    return DraftTrees.static(tensors, propose(scores, tensors, heads.token_map))


def source_on(tree: DynamicTree, device: torch.device) -> TreeTensors | Beam:
    """The candidate source of `build_tree`, on ``device``."""
    return tree.pool if isinstance(tree.pool, Beam) else tensors_on(tree.pool, device)


@functools.lru_cache(maxsize=8)
def tensors_on(tree: TokenTree, device: torch.device) -> TreeTensors:
    """The tree on ``device``, cached."""
    return TreeTensors.from_tree(tree, device)
