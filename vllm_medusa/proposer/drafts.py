"""A step's drafts by whatever heads and trees there are: what `decode.py` asks for.

Both kinds of heads, both kinds of trees, batched; nothing waits for the device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.proposer import draft
from vllm_medusa.proposer.build import Branching, Marginal, Plan, build_tree, fill_tree
from vllm_medusa.proposer.dynamic import MedusaStep
from vllm_medusa.proposer.hydra import HydraStep
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.dynamic import Beam, DynamicTree
from vllm_medusa.tree.pool import Pool
from vllm_medusa.tree.topology import MAX_NODES, TokenTree


def propose_tree(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [B, H], as for `proposer.draft`
    root: Tensor,  # int64 [B], the tokens that the target gave last
    tree: TokenTree | DynamicTree,
    lm_head: LMHead | None = None,
    useful_depth: int = MAX_NODES,  # dynamic trees get no deeper
) -> tuple[Tensor, TreeBatch]:
    """Draft: token ids, int64 [B, N], and the topologies they stand in.

    Hydra heads have the target's embedding bound.
    """
    batch, device = len(hidden_states), hidden_states.device
    if isinstance(tree, TokenTree):
        tensors = static_on(tree, device)
        every = torch.full((batch,), tree.num_nodes, device=device)
        if isinstance(heads, HydraHeads):
            step = HydraStep(heads, hidden_states, heads.embed, lm_head)
            tokens = fill_tree(step, plan_on(tree, device), root)
        else:
            tokens = draft(heads, hidden_states, tensors, lm_head)
        return tokens, tensors.batch(tree.num_nodes, every)
    factors = None if tree.sharpness is None else torch.tensor(tree.sharpness, device=device)
    useful = torch.full((batch,), useful_depth, device=device)
    drafter: Marginal | Branching
    if isinstance(heads, HydraHeads):
        drafter = HydraStep(heads, hidden_states, heads.embed, lm_head, factors)
    else:
        drafter = MedusaStep(heads, hidden_states, lm_head, factors)
    proposal = build_tree(drafter, source_on(tree, device), root, tree.num_nodes, useful)
    return proposal.token_ids, proposal.trees(tree.max_depth)


def source_on(tree: DynamicTree, device: torch.device) -> Pool | Beam:
    """What a builder fills, on ``device``."""
    return tree.pool if isinstance(tree.pool, Beam) else _pool_on(tree.pool, device)


@functools.lru_cache(maxsize=8)
def static_on(tree: TokenTree, device: torch.device) -> TreeTensors:
    """The tree on ``device``, made once."""
    return TreeTensors.from_tree(tree, device)


@functools.lru_cache(maxsize=8)
def plan_on(tree: TokenTree, device: torch.device) -> Plan:
    """How it is filled level by level."""
    return Plan.of(tree, device)


@functools.lru_cache(maxsize=8)
def _pool_on(tree: TokenTree, device: torch.device) -> Pool:
    return Pool.from_tree(tree, device)
