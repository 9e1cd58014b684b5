"""A tree of its own for every request: the heads' marginals choose among the nodes of a pool.

The confidence of a choice is the head's own probability of it, after the temperature that
calibration found for the head. It estimates how often the choice is accepted below an accepted
parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.heads.model import LMHead, MedusaHeads
from vllm_medusa.heads.packed import PackedHeads
from vllm_medusa.proposer.build import clean
from vllm_medusa.proposer.candidates import Choices
from vllm_medusa.proposer.sharded import (
    AllGather,
    VocabShard,
    local_topk,
    logit_values,
    merge_topk,
    token_ids,
)
from vllm_medusa.proposer.topk import stable_topk


def marginals(
    logits: Tensor,  # [B, >= D, V_draft]
    depth: int,
    width: int,
    sharpness: Tensor | None = None,  # float32 [>= D], factors on the logits; None: 1
    token_map: Tensor | None = None,  # int64 [V_draft] target ids
) -> Choices:
    """Read the choices and their confidences off the logits. No host sync."""
    scaled = _scaled(logits[:, :depth], sharpness)
    ids = stable_topk(logits[:, :depth], width)
    log_confidence = scaled.gather(-1, ids) - scaled.logsumexp(-1, keepdim=True)
    return Choices(_mapped(ids, token_map), clean(log_confidence))


def marginals_sharded(
    logits: Tensor,  # [B, >= D, V_shard]
    depth: int,
    width: int,
    shard: VocabShard,
    all_gather: AllGather,
    sharpness: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Choices:
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
    return Choices(_mapped(token_ids(best), token_map), clean(log_confidence))


@dataclass(frozen=True, eq=False)
class MedusaStep:
    """Medusa's heads at one step: the first drafter behind `build.build_tree`."""

    heads: MedusaHeads | PackedHeads
    hidden_states: Tensor  # [B, H], as for `proposer.draft`
    lm_head: LMHead | None = None
    sharpness: Tensor | None = None  # float32 [>= D]

    def marginals(self, depth: int, width: int) -> Choices:
        """The choices of the first ``depth`` heads."""
        states = self.heads(self.hidden_states, depth)
        logits = self.heads.compute_logits(states, self.lm_head)
        return marginals(logits, depth, width, self.sharpness, self.heads.token_map)


def _scaled(logits: Tensor, sharpness: Tensor | None) -> Tensor:
    """float32 logits [B, D, n] times each head's factor."""
    logits = logits.float()
    return logits if sharpness is None else logits * sharpness[: logits.shape[1], None]


def _mapped(ids: Tensor, token_map: Tensor | None) -> Tensor:
    return ids if token_map is None else token_map[ids]
