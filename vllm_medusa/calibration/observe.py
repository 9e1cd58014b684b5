"""Ranks and confidences from hidden states and actual tokens, in chunks of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.calibration.observations import MISSED, NO_LABEL
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import token_ranks
from vllm_medusa.training.losses import draft_labels

Logits = Callable[[Tensor], Tensor]  # [T, H] -> [T, >= V]
Array = npt.NDArray[Any]

SHARPNESS = tuple(2.0 ** (step / 8) for step in range(-16, 17))  # 1 / candidate temperatures
_ELEMENTS = {"cpu": 1 << 21}  # logits per chunk, to fit in cache
_MANY = 1 << 26  # on other devices


@dataclass(frozen=True)
class Seen:
    """Observations at n positions, m of them in detail."""

    ranks: Array  # int16 [n, K]
    confidences: Array  # float16 [n, K, R]
    own: Array  # float32 [m, K] logit of the actual token; NaN: none, or not in the vocabulary
    best: Array  # float32 [m, K] the largest logit
    partition: Array  # float32 [m, K, G] log sum exp of the logits times each of `SHARPNESS`
    first: Array  # bool [m, K]: the actual token had the largest logit
    labeled: Array  # bool [m, K]: a token exists


@torch.inference_mode()
def observe(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [n, H]
    labels: Tensor,  # int64 [n, K], target ids; NO_LABEL: none
    num_ranks: int,
    lm_head: Logits | None,
    closely: Tensor,  # bool [n]
    path: Tensor | None = None,  # int64 [n, K], the tokens after each position, for Hydra heads
) -> Seen:
    """Rank the actual tokens among the heads' logits, with the proposer's tie-breaking."""
    count, num_heads = labels.shape
    labels = draft_labels(labels, heads, -MISSED)
    elements = _ELEMENTS.get(hidden_states.device.type, _MANY)
    size = max(1, elements // (num_heads * heads.draft_vocab_size))
    parts = []
    for first in range(0, count, size):
        rows = slice(first, first + size)
        states = heads(hidden_states[rows], None, None if path is None else path[rows])
        logits = heads.compute_logits(states, lm_head).float()  # [c, K, V]
        parts.append(_look(logits, labels[rows], num_ranks, closely[rows]))
    return Seen(*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)))


def _look(logits: Tensor, labels: Tensor, num_ranks: int, closely: Tensor) -> tuple[Tensor, ...]:
    # labels: draft ids; below 0: `NO_LABEL`, or -`MISSED`, which the draft vocabulary lacks
    known = labels >= 0  # [c, K]
    own = logits.gather(2, labels.clamp_min(0)[..., None])  # [c, K, 1]
    ranks = token_ranks(logits, labels.clamp_min(0)).clamp_max(MISSED - 1)
    ranks = torch.where(known, ranks, torch.where(labels == NO_LABEL, NO_LABEL, MISSED))
    best = logits.topk(num_ranks).values  # [c, K, R]
    confidences = (best - logits.logsumexp(-1, keepdim=True)).exp()
    close = logits[closely]  # [m, K, V]
    partition = torch.stack([(close * s).logsumexp(-1) for s in SHARPNESS], -1)  # [m, K, G]
    return (
        ranks.to(torch.int16),
        confidences.to(torch.float16),
        own[..., 0].masked_fill(~known, torch.nan)[closely],
        best[..., 0][closely],
        partition,
        (ranks == 0)[closely],
        (labels != NO_LABEL)[closely],
    )
