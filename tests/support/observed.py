"""Calibrations without a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_medusa.calibration.observations import Observations


def observed(
    ranks: Any, lengths: Sequence[int], num_ranks: int = 3, temperature: float = 0.0, **more: Any
) -> Observations:
    """Ranks [n, K] of texts of these lengths, each for a separate prompt."""
    ranks, count = np.asarray(ranks, np.int16), len(lengths)
    values = {
        "offsets": np.cumsum([0, *lengths]),
        "temperatures": np.full(count, temperature, np.float32),
        "prompts": np.arange(count),
        "num_ranks": num_ranks,
    }
    return Observations(ranks=ranks, **values | more)
