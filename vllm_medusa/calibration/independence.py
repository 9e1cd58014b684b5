"""The paper's tree search: greedy, as if every head were right or wrong by itself.

The chance of a path is taken to be the product of its ranks' accuracies (Medusa, section 2.3.3),
and the expected tokens per step are 1 plus the sum over the tree's nodes. This is the search of the
reference implementation (FasterDecoding/Medusa, medusa/eval/gen_results.py), node for node:

- the first node is ``(0,)``, whatever its accuracy;
- candidates are, for every node taken, in the order they were taken, its next sibling and then its
  first child; the likeliest is taken, the first of equals;
- a path of chance 0 is never taken;
- products are made from the first head on, in the table's own precision (the reference: fp32).

Averages mislead where heads are right together: see `vllm_medusa.calibration.search`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.tree.topology import Path

Table = npt.NDArray[np.floating]  # [K, R]: how often head h's r-th best token is the right one


def independent_tree(
    accuracies: Table, num_draft_tokens: int, max_depth: int | None = None
) -> list[Path]:
    """Take the likeliest ``num_draft_tokens`` paths, parents first, of ``max_depth`` heads or all.

    Fewer come back when no more has a chance.
    """
    num_heads, num_ranks = accuracies.shape
    depth = num_heads if max_depth is None else min(max_depth, num_heads)
    # (-chance, who proposed it, sibling before child, path): of equals the first proposed is taken
    queue: list[tuple[float, int, int, Path]] = [(0.0, 0, 0, (0,))]
    paths: list[Path] = []
    while queue and len(paths) < num_draft_tokens:
        path = heapq.heappop(queue)[-1]
        paths.append(path)
        candidates = []
        if path[-1] + 1 < num_ranks:
            candidates.append((*path[:-1], path[-1] + 1))
        if len(path) < depth:
            candidates.append((*path, 0))
        for kind, candidate in enumerate(candidates):
            if (chance := float(path_chance(accuracies, candidate))) > 0:
                heapq.heappush(queue, (-chance, len(paths), kind, candidate))
    return paths


def path_chance(accuracies: Table, path: Sequence[int]) -> np.floating:
    """The product of a path's accuracies, from the first head on."""
    chance = accuracies[0, path[0]]
    for head, rank in enumerate(path[1:], start=1):
        chance = chance * accuracies[head, rank]
    return chance


def independent_tau(accuracies: Table, paths: Sequence[Sequence[int]]) -> float:
    """Expected tokens per step with the tree of ``paths`` if heads were independent."""
    return 1.0 + sum(float(path_chance(accuracies, path)) for path in paths)
