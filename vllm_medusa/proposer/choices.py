"""The choices of a drafter below some nodes, computed from logits, and their confidences.

The confidence of a choice is the head's probability, after applying the head's calibrated
temperature. It estimates how often the choice is accepted below an accepted
parent.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_medusa.kernels import CPU_DTYPES, cpu_function, uses_kernel
from vllm_medusa.noise import LevelNoise
from vllm_medusa.proposer.topk import (
    AllGather,
    VocabShard,
    local_topk,
    logit_values,
    merge_topk,
    stable_topk,
    token_ids,
)
from vllm_medusa.tree.draft_trees import IMPOSSIBLE

MAX_WIDTH = 64  # max choices of the CPU kernel
_best_choices = cpu_function(
    "best_choices", c_void_p, c_int32, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64,
    c_void_p, c_void_p, result=c_int32,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Choices:
    """The best choices below some nodes, best first."""

    token_ids: Tensor  # int64 [B, k, K], of the target's vocabulary
    log_confidence: Tensor  # float32 [B, k, K], <= 0, never NaN


# logits [B, k, V], K, factors on the logits (float32 [>= k], or None for 1), the rows' noise
ReadChoices = Callable[[Tensor, int, Tensor | None, LevelNoise | None], Choices]


def read_choices(
    logits: Tensor,  # [B, k, V_draft]
    width: int,  # K
    sharpness: Tensor | None = None,  # float32 [>= k], factors on the logits; None: 1
    noise: LevelNoise | None = None,  # of the k rows
    token_map: Tensor | None = None,  # int64 [V_draft] target ids
) -> Choices:
    """The best tokens and their probabilities. No host sync; on CPUs by `choices.cpp`."""
    if noise is not None:
        logits, sharpness = noise.scores(logits, sharpness), None
    found = None
    if not uses_kernel(logits.device.type):
        found = _read_on_cpu(logits, width, sharpness, token_map)
    return found or read_choices_in_torch(logits, width, sharpness, token_map)


def read_choices_in_torch(
    logits: Tensor, width: int, sharpness: Tensor | None = None, token_map: Tensor | None = None
) -> Choices:
    """`read_choices` for any device and dtype."""
    scaled, ids = _scaled(logits, sharpness), stable_topk(logits, width)
    log_confidence = scaled.gather(-1, ids) - scaled.logsumexp(-1, keepdim=True)
    return _choices(ids, log_confidence, token_map)


def _read_on_cpu(
    logits: Tensor, width: int, sharpness: Tensor | None, token_map: Tensor | None
) -> Choices | None:
    """`read_choices` in C++; None if the kernel does not support such logits."""
    batch, nodes, vocab = logits.shape
    if width > min(MAX_WIDTH, vocab) or logits.dtype not in CPU_DTYPES:
        return None
    rows = logits.flatten(0, 1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    factors = logits.new_ones(nodes, dtype=torch.float32) if sharpness is None else sharpness
    factors = factors[:nodes].contiguous()
    ids = torch.empty((batch, nodes, width), dtype=torch.int64)
    log_confidence = torch.empty((batch, nodes, width), dtype=torch.float32)
    finite = _best_choices(
        rows.data_ptr(), CPU_DTYPES[logits.dtype], batch * nodes, vocab, rows.stride(0),
        factors.data_ptr(), nodes, width, ids.data_ptr(), log_confidence.data_ptr(),
    )  # fmt: skip
    if not finite:
        return None
    return Choices(ids if token_map is None else token_map.take(ids), log_confidence)


def read_choices_sharded(
    logits: Tensor,  # [B, k, V_shard]
    width: int,
    shard: VocabShard,
    all_gather: AllGather,
    sharpness: Tensor | None = None,
    noise: LevelNoise | None = None,
    token_map: Tensor | None = None,
) -> Choices:
    """The same from a rank's part of the vocabulary: bitwise equal choices on every rank.

    A rank sends its candidates and one log-sum-exp per row, which are merged in rank order.
    """
    if noise is not None:
        logits, sharpness = noise.scores(logits, sharpness), None
    keys = local_topk(logits, width, shard)  # [B, k, width]
    own = _scaled(logits[..., : shard.num_ids], sharpness)
    part = own.logsumexp(-1) if shard.num_ids else own.new_full(keys.shape[:2], -torch.inf)
    packed = part.contiguous().view(torch.int32).to(torch.int64).unsqueeze(-1)
    gathered = all_gather(torch.cat([keys, packed], -1))  # [R, B, k, width + 1]
    best = merge_topk(gathered[..., :width], width)
    parts = gathered[..., width].to(torch.int32).view(torch.float32)  # [R, B, k]
    values = _scaled(logit_values(best), sharpness) - parts.logsumexp(0).unsqueeze(-1)
    return _choices(token_ids(best), values, token_map)


def _choices(ids: Tensor, log_confidence: Tensor, token_map: Tensor | None) -> Choices:
    """Make confidences sortable: at most 0, and -inf where logits were NaN."""
    clean = log_confidence.nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE).clamp_max(0)
    return Choices(ids if token_map is None else token_map[ids], clean)


def _scaled(logits: Tensor, sharpness: Tensor | None) -> Tensor:
    logits = logits.float()
    return logits if sharpness is None else logits * sharpness[: logits.shape[1], None]
