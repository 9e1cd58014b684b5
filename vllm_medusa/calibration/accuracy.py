"""Accuracy of each head's choices at all positions, and at those that decoding reaches.

Decoding uses head h only where a path to depth h was accepted, and only at positions where steps
start. Accuracy there is far below the average over all positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_medusa.calibration.observations import NO_LABEL, Observations
from vllm_medusa.calibration.walks import Ranks, Walks


def measure_accuracy(observations: Observations, walks: Walks) -> dict[str, Any]:
    """The share of labels at each rank of each head [K][R], and the number of labels [K].

    ``overall``: at every position; ``walked``: where ``walks`` of all texts reach an inner node of
    depth h. Plain JSON; a share is None where nothing was counted.
    """
    visited = walks.visited()
    walked = walks.ranks[visited]
    reached = walks.jumps[visited] - 1  # depth at which each step stopped
    inner = {path[:-1] for path in walks.paths if path}
    has_child = np.array([path in inner for path in walks.paths])[walks.stops[visited]]
    cases: dict[str, list[Ranks]] = {"overall": list(observations.ranks.T), "walked": []}
    for head in range(observations.num_heads):
        # counted: passed by a deeper step, or stopped at a node of this depth with children
        counted = (reached > head) | ((reached == head) & has_child)
        cases["walked"].append(walked[counted, head])
    return {
        "accuracy": {
            name: [shares(ranks, observations.num_ranks) for ranks in heads]
            for name, heads in cases.items()
        },
        "counted_positions": {
            name: [int((ranks != NO_LABEL).sum()) for ranks in heads]
            for name, heads in cases.items()
        },
    }


def shares(ranks: Ranks, num_ranks: int) -> list[float | None]:
    """Fractions [R] of labels at each rank; None without labels."""
    labels = ranks[ranks != NO_LABEL]
    if not len(labels):
        return [None] * num_ranks
    counts = np.bincount(labels[labels < num_ranks], minlength=num_ranks)
    return [round(count / len(labels), 4) for count in counts.tolist()]
