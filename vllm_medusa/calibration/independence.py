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
    accuracies: Table,
    num_draft_tokens: int,
    max_depth: int | None = None,
    max_children: Sequence[int] | None = None,
) -> tuple[list[Path], list[float]]:
    """Take the likeliest ``num_draft_tokens`` paths; fewer come back when no more has a chance.

    Args:
        accuracies: [K, R].
        num_draft_tokens: nodes wanted, root excluded.
        max_depth: heads that may be used; None: all.
        max_children: choices of each head that may be used; None: all R.

    Returns:
        The paths, likeliest first, parents first; and for each prefix the expected tokens per step.

    """
    depth, widths = _limits(accuracies, max_depth, max_children)
    paths: list[Path] = []
    taus: list[float] = []
    chances = [1.0]
    # (-chance, who proposed it, sibling before child, path): of equals the first proposed is taken
    queue: list[tuple[float, int, int, Path]] = []
    path: Path = (0,)
    chance = float(path_chance(accuracies, path))
    while len(paths) < num_draft_tokens:
        chances.append(chance)
        paths.append(path)
        taus.append(sum(chances))
        head, rank = len(path) - 1, path[-1]
        if rank + 1 < widths[head]:
            _propose(queue, accuracies, (*path[:-1], rank + 1), len(paths), 0)
        if head + 1 < depth:
            _propose(queue, accuracies, (*path, 0), len(paths), 1)
        if not queue:
            break
        negative_chance, _, _, path = heapq.heappop(queue)
        chance = -negative_chance
    return paths, taus


def path_chance(accuracies: Table, path: Sequence[int]) -> np.floating:
    """The product of a path's accuracies, from the first head on."""
    chance = accuracies[0, path[0]]
    for head, rank in enumerate(path[1:], start=1):
        chance = chance * accuracies[head, rank]
    return chance


def independent_tau(accuracies: Table, paths: Sequence[Sequence[int]]) -> float:
    """Expected tokens per step with the tree of ``paths`` if heads were independent."""
    return 1.0 + sum(float(path_chance(accuracies, path)) for path in paths)


def _propose(
    queue: list[tuple[float, int, int, Path]], accuracies: Table, path: Path, by: int, kind: int
) -> None:
    chance = float(path_chance(accuracies, path))
    if chance > 0:
        heapq.heappush(queue, (-chance, by, kind, path))


def _limits(
    accuracies: Table, max_depth: int | None, max_children: Sequence[int] | None
) -> tuple[int, list[int]]:
    """Levels and choices per head that may be used."""
    num_heads, num_ranks = accuracies.shape
    if not (np.isfinite(accuracies).all() and (accuracies >= 0).all()):
        raise ValueError("the accuracies hold something else than finite shares from 0: mend them")
    depth = num_heads if max_depth is None else min(max_depth, num_heads)
    widths = list(max_children or [num_ranks] * depth)
    if len(widths) < depth or min(widths[:depth]) < 1 or max(widths[:depth]) > num_ranks:
        raise ValueError(
            f"max_children is {widths}; give a number from 1 to {num_ranks} for each of the "
            f"{depth} heads."
        )
    return depth, widths
