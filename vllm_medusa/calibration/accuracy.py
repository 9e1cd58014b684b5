"""How often each head's choices are right: everywhere, and where decoding really asks.

Everywhere is what the paper's estimate multiplies. Decoding asks head h only where a path to depth
h was accepted, and only at the positions where steps start. After the best choices all the way (the
*spine*) the next head stands where its training had it; after any other choice it was right about
something it thought less likely, and the next head mostly goes on with the branch not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.calibration.observations import NO_LABEL, Observations
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.tree.topology import Path

Table = npt.NDArray[np.float32]  # [K, R] shares; NaN where nothing was counted


@dataclass(frozen=True)
class Accuracy:
    """Shares of positions at which head h's rank r was right, by where the head was asked."""

    overall: Table  # at every position
    spine: Table  # at every position where the heads before were right with rank 0
    sibling: Table  # ... with ranks below R, not all 0
    walked: Table  # where walks with the tree reach an inner node of depth h
    walked_spine: Table  # ... the spine's
    walked_sibling: Table  # ... another
    asked: npt.NDArray[np.int64]  # [K, 6] positions counted, in the order above

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: four decimals, None where nothing was counted."""
        names = ("overall", "spine", "sibling", "walked", "walked_spine", "walked_sibling")
        tables = {name: _plain(getattr(self, name)) for name in names}
        counts = {name: self.asked[:, place].tolist() for place, name in enumerate(names)}
        return {"accuracy": tables, "positions_asked": counts}


def measure_accuracy(
    observations: Observations, tree: Sequence[Path], num_ranks: int | None = None
) -> Accuracy:
    """Count over all texts; ``tree`` (parents first) is what the walks decode with."""
    width = num_ranks or observations.num_ranks
    ranks = observations.ranks.astype(np.int32)
    every = _paths_taken(ranks, width)
    walks = Walks(observations.texts())
    for path in tree:
        walks.add(path)
    visited = walks.visited()
    walked_ranks = walks.ranks[visited]
    reached = walks.jumps[visited] - 1  # depth at which each step stopped
    spine = _spine(walked_ranks)
    parts: list[list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]]] = []
    inner = {path[:-1] for path in tree}
    has_child = np.array([path in inner for path in walks.paths])
    for head in range(observations.num_heads):
        # asked: on the way to a deeper stop, or stopped at a node of this depth with children
        asked = (reached > head) | ((reached == head) & has_child[walks.stops[visited]])
        off, on = every[head]
        parts.append(
            [
                (np.ones(len(ranks), bool), ranks[:, head]),
                (on, ranks[:, head]),
                (off, ranks[:, head]),
                (asked, walked_ranks[:, head]),
                (asked & spine[head], walked_ranks[:, head]),
                (asked & ~spine[head], walked_ranks[:, head]),
            ]
        )
    counted = [[shares(column[where], width) for where, column in row] for row in parts]
    tables = (np.stack([row[place][0] for row in counted]) for place in range(6))
    overall, spine_table, sibling, walked, walked_spine, walked_sibling = tables
    return Accuracy(
        overall=overall,
        spine=spine_table,
        sibling=sibling,
        walked=walked,
        walked_spine=walked_spine,
        walked_sibling=walked_sibling,
        asked=np.array([[part[1] for part in row] for row in counted], np.int64),
    )


def accuracy_table(ranks: npt.NDArray[np.integer], num_ranks: int) -> Table:
    """Head h's share of labels at rank r: ranks [N, K] -> fp32 [K, R]; 0 for a head without any.

    Counts divided in fp32, as the reference's table is.
    """
    rows = [shares(ranks[:, head], num_ranks)[0] for head in range(ranks.shape[1])]
    return np.nan_to_num(np.stack(rows)).astype(np.float32)


def shares(ranks: npt.NDArray[np.integer], num_ranks: int) -> tuple[Table, int]:
    """Shares [R] of labels at each rank, and how many labels there are; NaN without any."""
    labels = ranks[ranks != NO_LABEL]
    counts = np.bincount(labels[labels < num_ranks], minlength=num_ranks).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return counts / np.float32(len(labels)), len(labels)


def _paths_taken(
    ranks: npt.NDArray[np.int32], width: int
) -> list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]:
    """For each head: where all heads before were right within ``width``, off and on the spine."""
    right = (ranks >= 0) & (ranks < width)
    before = np.ones(len(ranks), bool)
    found = []
    for head, on in enumerate(_spine(ranks)):
        found.append((before & ~on, on))
        before = before & right[:, head]
    return found


def _spine(ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """[K, N]: all heads before were right with rank 0."""
    on = np.ones((ranks.shape[1] + 1, len(ranks)), bool)
    for head in range(ranks.shape[1]):
        on[head + 1] = on[head] & (ranks[:, head] == 0)
    return on[:-1]


def _plain(table: Table) -> list[list[float | None]]:
    return [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in table]
