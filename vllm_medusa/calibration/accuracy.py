"""Accuracy of each head's choices at all positions, and at those that decoding reaches.

Decoding uses head h only where a path to depth h was accepted, and only at positions where steps
start. Accuracy there is far below the average over all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.calibration.observations import NO_LABEL, Observations
from vllm_medusa.calibration.walks import Ranks, Walks
from vllm_medusa.tree.topology import Path

Table = npt.NDArray[np.float32]  # [K, R] fractions; NaN where nothing was counted


@dataclass(frozen=True)
class Accuracy:
    """Fractions of positions at which rank r of head h was correct."""

    overall: Table  # at every position
    walked: Table  # where walks with the tree reach an inner node of depth h
    counted: npt.NDArray[np.int64]  # [K, 2] positions counted

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: four decimals, None where nothing was counted."""
        tables = {"overall": self.overall, "walked": self.walked}
        return {
            "accuracy": {
                name: [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in table]
                for name, table in tables.items()
            },
            "counted_positions": dict(zip(tables, self.counted.T.tolist(), strict=True)),
        }


def measure_accuracy(observations: Observations, tree: Sequence[Path]) -> Accuracy:
    """Count over all texts; ``tree`` (parents first) is the tree of the walks."""
    walks = Walks(observations.texts(), tree)
    visited = walks.visited()
    walked = walks.ranks[visited]
    reached = walks.jumps[visited] - 1  # depth at which each step stopped
    inner = {path[:-1] for path in tree}
    has_child = np.array([path in inner for path in walks.paths])[walks.stops[visited]]
    rows = []
    for head in range(observations.num_heads):
        # counted: passed by a deeper step, or stopped at a node of this depth with children
        counted = (reached > head) | ((reached == head) & has_child)
        cases = observations.ranks[:, head], walked[counted, head]
        rows.append([shares(case, observations.num_ranks) for case in cases])
    overall, there = (np.stack([row[case][0] for row in rows]) for case in (0, 1))
    return Accuracy(overall, there, np.array([[count for _, count in row] for row in rows]))


def shares(ranks: Ranks, num_ranks: int) -> tuple[Table, int]:
    """Fractions [R] of labels at each rank, and the number of labels; NaN without labels."""
    labels = ranks[ranks != NO_LABEL]
    counts = np.bincount(labels[labels < num_ranks], minlength=num_ranks).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return counts / np.float32(len(labels)), len(labels)
