"""Ranks of the actual tokens among the heads' choices, and the temperature of each head.

A head is calibrated if a fraction c of the tokens to which it gives probability c are correct. One
number for each head, the temperature that divides its logits, is fitted to the likelihood of the
actual tokens (Guo et al., https://arxiv.org/abs/1706.04599).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_medusa.calibration.observations import MISSED, NO_LABEL
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import token_ranks
from vllm_medusa.training.losses import draft_labels

Logits = Callable[[Tensor], Tensor]  # [T, H] -> [T, >= V]
Array = npt.NDArray[Any]

_STEP = 1 / 8  # of the grid, in powers of two
SHARPNESS = tuple(2.0 ** (step * _STEP) for step in range(-16, 17))  # 1 / candidate temperatures
_CPU_ELEMENTS = 1 << 21  # logits per chunk, to fit in cache
_DEVICE_ELEMENTS = 1 << 26  # on other devices


class Observed(NamedTuple):
    """Observations at n positions; temperatures are fitted at m of them."""

    ranks: Array  # int16 [n, K]
    own: Array  # float32 [m, K] logit of the actual token; NaN: none, or not in the vocabulary
    partition: Array  # float32 [m, K, G] log sum exp of the logits times each of `SHARPNESS`


@torch.inference_mode()
def observe(
    heads: MedusaHeads,
    hidden_states: Tensor,  # [n, H]
    labels: Tensor,  # int64 [n, K], target ids; NO_LABEL: none
    lm_head: Logits | None,
    fit: Tensor,  # bool [n], the m positions at which temperatures are fitted
    path: Tensor | None = None,  # int64 [n, K], the tokens after each position, for Hydra heads
) -> Observed:
    """Rank the actual tokens among the heads' logits, with the proposer's tie-breaking."""
    count, num_heads = labels.shape
    labels = draft_labels(labels, heads, -MISSED)  # [n, K]
    elements = _CPU_ELEMENTS if hidden_states.is_cpu else _DEVICE_ELEMENTS
    size = max(1, elements // (num_heads * heads.draft_vocab_size))
    parts = []
    for first in range(0, count, size):
        rows = slice(first, first + size)
        states = heads(hidden_states[rows], None, None if path is None else path[rows])
        logits = heads.compute_logits(states, lm_head).float()  # [c, K, V_draft]
        known, ids = labels[rows] >= 0, labels[rows].clamp_min(0)  # [c, K]
        ranks = token_ranks(logits, ids).clamp_max(MISSED - 1)
        missing = torch.where(labels[rows] == NO_LABEL, NO_LABEL, MISSED)
        own = logits.gather(2, ids[..., None])[..., 0].masked_fill(~known, torch.nan)  # [c, K]
        chosen = logits[fit[rows]]  # [m, K, V_draft]
        partition = torch.stack([(chosen * s).logsumexp(-1) for s in SHARPNESS], -1)  # [m, K, G]
        ranks = torch.where(known, ranks, missing).to(torch.int16)
        parts.append((ranks, own[fit[rows]], partition))
    return Observed(*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)))


def fit_temperature(own: Array, partition: Array) -> float | None:
    """Fit a head's temperature to its ``own`` [m] and ``partition`` [m, G]; None: no labels.

    The likelihood is known on a grid of temperatures from 1/4 to 4; a parabola through the best
    three points interpolates. At an end of the grid, that end is used.
    """
    known = ~np.isnan(own)
    if not known.any():
        return None
    nll = (partition[known] - own[known, None] * np.array(SHARPNESS)).mean(0)  # [G]
    best = int(nll.argmin())
    power = math.log2(SHARPNESS[best])
    if 0 < best < len(SHARPNESS) - 1:
        left, middle, right = nll[best - 1 : best + 2]
        if (bend := left - 2 * middle + right) > 0:
            power += float(0.5 * (left - right) / bend) * _STEP
    return float(2.0**-power)
