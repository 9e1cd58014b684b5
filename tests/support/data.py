"""Calibrations and training records without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_medusa.calibration.observations import Observations
from vllm_medusa.offline.records import Record


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


def random_records(count: int = 12, seed: int = 0) -> list[Record]:
    """Several spans each, also at the edges."""
    rng = random.Random(seed)
    records = []
    for index in range(count):
        length = rng.randrange(2, 40)
        cuts = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randint(1, 3))))
        spans = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b)
        ids = tuple(rng.randrange(512) for _ in range(length))
        heat = rng.choice([None, 0.0, 0.7])
        records.append(Record(index, index + 10, str(index), ids, spans, heat))
    return records
