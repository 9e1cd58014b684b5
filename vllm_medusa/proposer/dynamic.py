"""A tree of its own for every request: the heads' marginals choose among the nodes of a pool.

The confidence of a choice is the head's own probability of it, after the temperature that
calibration found for the head. It estimates how often the choice is accepted below an accepted
parent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.proposer import draft
from vllm_medusa.proposer.sharded import (
    AllGather,
    VocabShard,
    local_topk,
    logit_values,
    merge_topk,
    token_ids,
)
from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.dynamic import DynamicTree
from vllm_medusa.tree.pool import Pool
from vllm_medusa.tree.topology import MAX_NODES, TokenTree


@dataclass(frozen=True, eq=False)
class Marginals:
    """The best choices of every head, best first."""

    token_ids: Tensor  # int64 [B, D, width], of the target's vocabulary
    log_confidence: Tensor  # float32 [B, D, width], <= 0


@dataclass(frozen=True, eq=False)
class Proposal:
    """A tree of at most N nodes for each request, best first."""

    token_ids: Tensor  # int64 [B, N]; column 0, the root, holds 0
    order: Tensor  # int64 [B, N] node of the pool; see `Pool.trees`
    log_survival: Tensor  # float32 [B, N], not increasing; 0 for the root

    @property
    def num_nodes(self) -> Tensor:
        """int64 [B]: nodes that can survive, root included; they are a prefix."""
        return self.log_survival.isfinite().sum(1)


def marginals(
    logits: Tensor,  # [B, >= D, V_draft]
    depth: int,
    width: int,
    sharpness: Tensor | None = None,  # float32 [>= D], factors on the logits; None: 1
    token_map: Tensor | None = None,  # int64 [V_draft] target ids
) -> Marginals:
    """Read the choices and their confidences off the logits. No host sync."""
    scaled = _scaled(logits[:, :depth], sharpness)
    ids = stable_topk(logits[:, :depth], width)
    log_confidence = scaled.gather(-1, ids) - scaled.logsumexp(-1, keepdim=True)
    return Marginals(_mapped(ids, token_map), _clean(log_confidence))


def marginals_sharded(
    logits: Tensor,  # [B, >= D, V_shard]
    depth: int,
    width: int,
    shard: VocabShard,
    all_gather: AllGather,
    sharpness: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Marginals:
    """The same from a rank's part of the vocabulary: equal choices, bit by bit, on every rank.

    A rank sends its candidates and one log-sum-exp a head, which are merged in rank order.
    """
    local = logits[:, :depth, : shard.num_ids]
    keys = local_topk(logits[:, :depth], width, shard)  # [B, D, width]
    if shard.num_ids:
        part = _scaled(local, sharpness).logsumexp(-1)  # [B, D]
    else:
        part = torch.full(keys.shape[:2], -float("inf"), device=keys.device)
    packed = part.contiguous().view(torch.int32).to(torch.int64).unsqueeze(-1)
    gathered = all_gather(torch.cat([keys, packed], -1))  # [R, B, D, width + 1]
    best = merge_topk(gathered[..., :width], width)
    parts = gathered[..., width].to(torch.int32).view(torch.float32)  # [R, B, D]
    values = _scaled(logit_values(best), sharpness)
    log_confidence = values - parts.logsumexp(0).unsqueeze(-1)
    return Marginals(_mapped(token_ids(best), token_map), _clean(log_confidence))


def grow(choices: Marginals, pool: Pool, num_nodes: int, max_depth: Tensor) -> Proposal:
    """The best ``num_nodes`` nodes of the pool for every request, root included. No host sync.

    Nodes deeper than ``max_depth`` (int64 [B]) come last, with survival -inf: no token of theirs
    would be kept. So do those deeper than there are ``choices``.
    """
    survival = pool.survival(choices.log_confidence)  # [B, M]
    survival = survival.masked_fill(pool.tensors.depths > max_depth[:, None], -float("inf"))
    order = pool.best(survival, num_nodes)
    tokens = choices.token_ids.flatten(1)  # [B, D * width]
    places = pool.last_place[order].clamp_max(tokens.shape[1] - 1)  # [B, N]
    tokens = tokens.gather(1, places)
    tokens[:, 0] = 0
    return Proposal(tokens, order, survival.gather(1, order))


def propose_tree(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [B, H], as for `proposer.draft`
    tree: TokenTree | DynamicTree,
    lm_head: LMHead | None = None,
    useful_depth: int = MAX_NODES,  # dynamic trees get no deeper
) -> tuple[Tensor, TreeBatch]:
    """Draft: token ids, int64 [B, N], and the topologies they stand in."""
    batch, device = len(hidden_states), hidden_states.device
    if isinstance(tree, TokenTree):
        tensors = _static_on(tree, device)
        every = torch.full((batch,), tree.num_nodes, device=device)
        return draft(heads, hidden_states, tensors, lm_head), tensors.batch(tree.num_nodes, every)
    pool, depth = _pool_on(tree.pool, device), tree.pool.max_depth
    logits = heads.compute_logits(heads(hidden_states, depth), lm_head)
    factors = None if tree.sharpness is None else logits.new_tensor(tree.sharpness).float()
    choices = marginals(logits, depth, pool.width, factors, heads.token_map)
    proposal = grow(choices, pool, tree.num_nodes, torch.full((batch,), useful_depth))
    return proposal.token_ids, pool.trees(proposal.order, proposal.num_nodes)


@functools.lru_cache(maxsize=8)
def _static_on(tree: TokenTree, device: torch.device) -> TreeTensors:
    return TreeTensors.from_tree(tree, device)


@functools.lru_cache(maxsize=8)
def _pool_on(tree: TokenTree, device: torch.device) -> Pool:
    return Pool.from_tree(tree, device)


def _scaled(logits: Tensor, sharpness: Tensor | None) -> Tensor:
    """float32 logits [B, D, n] times each head's factor."""
    logits = logits.float()
    return logits if sharpness is None else logits * sharpness[: logits.shape[1], None]


def _mapped(ids: Tensor, token_map: Tensor | None) -> Tensor:
    return ids if token_map is None else token_map[ids]


def _clean(log_confidence: Tensor) -> Tensor:
    """At most 0, and -inf where logits were NaN, so that survivals can be sorted."""
    return log_confidence.nan_to_num(nan=-float("inf"), neginf=-float("inf")).clamp_max(0)
