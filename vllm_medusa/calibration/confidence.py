"""Calibration error of the heads, and the temperature that corrects it.

A head is calibrated if a fraction c of the tokens to which it gives probability c are correct. The
expected calibration error (ECE; Guo et al., https://arxiv.org/abs/1706.04599) is the gap between
the two, averaged over bins of c weighted by their positions. One number for each head, the
temperature that divides its logits, is fitted to the likelihood of the actual tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.calibration.observe import SHARPNESS

NUM_BINS = 15
Floats = npt.NDArray[Any]


def calibration_error(confidence: Floats, right: Floats, bins: int = NUM_BINS) -> float:
    """ECE, from 0 to 1, of confidences [n] and correctness [n]; NaN if n is 0."""
    if not len(confidence):
        return float("nan")
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(place, confidence - right, bins)  # summed over each bin
    return float(np.abs(gaps).sum() / len(confidence))


@dataclass(frozen=True)
class Fit:
    """One head's temperature, the divisor of its logits."""

    temperature: float
    nll: float  # nats per token, uncorrected
    fitted_nll: float
    ece: float  # of the best token, uncorrected, on the positions of the fit
    fitted_ece: float


def fit_temperature(
    own: Floats, best: Floats, partition: Floats, first: Floats, labeled: Floats
) -> Fit | None:
    """Fit one head: [m], [m], [m, G], bool [m], bool [m] of `observe.Seen`; None without labels.

    The likelihood is known on a grid of temperatures from 1/4 to 4; a parabola through the best
    three points interpolates. At an end of the grid, that end is used.
    """
    grid = np.log2(np.array(SHARPNESS))
    known = ~np.isnan(own)
    if not known.any():
        return None
    sharpness = 2.0**grid
    nll = (partition[known] - own[known, None] * sharpness).mean(0)  # [G]
    low = int(nll.argmin())
    at, fitted = float(grid[low]), float(nll[low])
    if 0 < low < len(grid) - 1:
        left, middle, right = nll[low - 1 : low + 2]
        bend = left - 2 * middle + right
        shift = float(0.5 * (left - right) / bend) if bend > 0 else 0.0
        at += shift * float(grid[1] - grid[0])
        fitted = float(middle - 0.25 * (left - right) * shift)

    def ece(power: float) -> float:
        place = np.clip((power - grid[0]) / (grid[1] - grid[0]), 0, len(grid) - 1)
        under = min(int(place), len(grid) - 2)
        share = place - under
        logs = (1 - share) * partition[labeled, under] + share * partition[labeled, under + 1]
        confidence = np.exp(np.minimum(best[labeled] * 2.0**power - logs, 0))
        return calibration_error(confidence, first[labeled])

    plain = len(grid) // 2  # sharpness 1
    return Fit(float(2.0**-at), float(nll[plain]), fitted, ece(0.0), ece(at))
