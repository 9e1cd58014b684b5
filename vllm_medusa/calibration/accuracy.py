"""How often each head's choices are right: everywhere, and where decoding really asks.

Decoding uses head h only where a path to depth h was accepted, and only at positions where steps
start. After the best choices all the way (the *spine*) the next head stands where its training had
it; after any other choice it is right far less often.
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

Table = npt.NDArray[np.float32]  # [K, R] shares; NaN where nothing was counted

CASES = ("overall", "spine", "sibling", "walked", "walked_spine", "walked_sibling")


@dataclass(frozen=True)
class Accuracy:
    """Shares of positions at which head h's rank r was right, by where the head was asked."""

    overall: Table  # at every position
    spine: Table  # at every position where the heads before were right with rank 0
    sibling: Table  # ... with ranks below R, not all 0
    walked: Table  # where walks with the tree reach an inner node of depth h
    walked_spine: Table  # ... the spine's
    walked_sibling: Table  # ... another
    asked: npt.NDArray[np.int64]  # [K, 6] positions counted, in the order of `CASES`

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: four decimals, None where nothing was counted."""
        return {
            "accuracy": {case: _plain(getattr(self, case)) for case in CASES},
            "positions_asked": dict(zip(CASES, self.asked.T.tolist(), strict=True)),
        }


def measure_accuracy(observations: Observations, tree: Sequence[Path]) -> Accuracy:
    """Count over all texts; ``tree`` (parents first) is what the walks decode with."""
    width = observations.num_ranks
    ranks = observations.ranks
    walks = Walks(observations.texts(), tree)
    visited = walks.visited()
    walked = walks.ranks[visited]
    reached = walks.jumps[visited] - 1  # depth at which each step stopped
    inner = {path[:-1] for path in tree}
    has_child = np.array([path in inner for path in walks.paths])
    on, walked_on = _spine(ranks), _spine(walked)
    taken = np.ones(len(ranks), bool)  # all heads before were right with a rank below R
    rows = []
    for head in range(observations.num_heads):
        # asked: on the way to a deeper stop, or stopped at a node of this depth with children
        asked = (reached > head) | ((reached == head) & has_child[walks.stops[visited]])
        here, there = ranks[:, head], walked[:, head]
        cases = (
            here,
            here[on[head]],
            here[taken & ~on[head]],
            there[asked],
            there[asked & walked_on[head]],
            there[asked & ~walked_on[head]],
        )
        rows.append([shares(case, width) for case in cases])
        taken = taken & (here >= 0) & (here < width)
    tables = {case: np.stack([row[i][0] for row in rows]) for i, case in enumerate(CASES)}
    return Accuracy(**tables, asked=np.array([[count for _, count in row] for row in rows]))


def shares(ranks: Ranks, num_ranks: int) -> tuple[Table, int]:
    """Shares [R] of labels at each rank, and how many labels there are; NaN without any."""
    labels = ranks[ranks != NO_LABEL]
    counts = np.bincount(labels[labels < num_ranks], minlength=num_ranks).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return counts / np.float32(len(labels)), len(labels)


def _spine(ranks: Ranks) -> npt.NDArray[np.bool_]:
    """[K, N]: all heads before were right with rank 0."""
    first = np.ones((1, len(ranks)), bool)
    return np.logical_and.accumulate([*first, *(ranks[:, :-1] == 0).T])


def _plain(table: Table) -> list[list[float | None]]:
    return [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in table]
