"""A calibration in plain JSON, as the heads' config.json keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_medusa.calibration.accuracy import Accuracy
from vllm_medusa.calibration.confidence import Fit, reliability
from vllm_medusa.calibration.observations import FILE, NO_LABEL, Observations
from vllm_medusa.tree.topology import TokenTree


def summarise(
    observations: Observations, accuracy: Accuracy, fits: Sequence[Fit | None], tree: TokenTree
) -> dict[str, Any]:
    """What ``medusa.calibration`` holds; ``tree`` is what the walks decoded with.

    ``calibration_error`` is the ECE of each head's choices, best first; ``temperature`` of ``fit``
    is what a head's logits are to be divided by for its confidence to be right.
    """
    sampled = ~np.isnan(observations.temperatures)
    lengths = np.diff(observations.offsets)
    by_temperature = {
        f"{value:g}": int(lengths[observations.temperatures == value].sum())
        for value in np.unique(observations.temperatures[sampled])
    }
    if not sampled.all():
        by_temperature["unknown"] = int(lengths[~sampled].sum())
    return {
        "file": FILE,
        "positions": len(observations.ranks),
        "texts": observations.num_texts,
        "prompts": len(np.unique(observations.prompts)),
        "positions_by_temperature": by_temperature,
        "temperature": observations.temperature(),
        "walked_with": tree.to_lists(),
        **accuracy.to_dict(),
        "calibration_error": _calibration_errors(observations),
        "fit": [
            fit and {name: round(value, 4) for name, value in vars(fit).items()} for fit in fits
        ],
        "source": observations.source,
    }


def _calibration_errors(observations: Observations) -> list[list[float | None]]:
    """ECE [K, R] of every head's choices."""
    errors: list[list[float | None]] = []
    for head in range(observations.num_heads):
        ranks = observations.ranks[:, head]
        known = ranks != NO_LABEL
        confidence = observations.confidences[known, head].astype(np.float64)
        row = [
            reliability(confidence[:, rank], ranks[known] == rank).ece
            for rank in range(observations.num_ranks)
        ]
        errors.append([None if np.isnan(error) else round(error, 4) for error in row])
    return errors
