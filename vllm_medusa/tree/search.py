"""Trees for given heads: which nodes a budget is best spent on.

What decides is how many tokens a verification step yields, so text that the target wrote is walked
as decoding would walk it: a step that accepts a path goes on behind it. Shares of positions at
which a path would have been right mislead: they count positions that decoding never stops at, and
after an accepted token the next head is right far less often than its average says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.tree.topology import Path

Ranks = npt.NDArray[np.integer]  # [T, K]


def walked_tree(
    texts: Sequence[Ranks], num_draft_tokens: int, max_rank: int
) -> tuple[list[Path], list[float]]:
    """Grow a tree node by node, each time by the one that makes the walks shortest.

    Args:
        texts: for each text, the rank [T, K] (0 = best) that every head, standing at position t,
            gave to the token it had to foretell.
        num_draft_tokens: nodes wanted, root excluded; fewer come back when the heads offer no more.
        max_rank: choices of a head that may be used, 0 to ``max_rank - 1``.

    Returns:
        The paths, best first, parents first: every prefix is the tree of its size. And for each
        prefix the tokens per step of the walks, tau.

    Candidates are the next choice below every node; ties go to the shallower, then the lower path.

    """
    walks = _Walks(texts, max_rank)
    num_heads = walks.ranks.shape[2]
    children = np.full((1, max_rank + 1), -1)  # [N, R + 1]: node of each choice, -1 for none
    paths: list[Path] = [()]
    widths = [0]  # children of each node so far
    found: list[float] = []
    while len(found) < num_draft_tokens:
        grown = np.vstack([children, np.full((1, max_rank + 1), -1)])
        best: tuple[float, int, Path, int] | None = None
        for parent, path in enumerate(paths):
            if len(path) == num_heads or widths[parent] == max_rank:
                continue
            grown[parent, widths[parent]] = len(paths)
            child = (*path, widths[parent])
            candidate = (-walks.tau(grown, num_heads), len(child), child, parent)
            grown[parent, widths[parent]] = -1
            if best is None or candidate < best:
                best = candidate
        if best is None:
            break
        negative_tau, _, child, parent = best
        grown[parent, widths[parent]] = len(paths)
        children = grown
        widths[parent] += 1
        widths.append(0)
        paths.append(child)
        found.append(-negative_tau)
    return paths[1:], found


def walk_tau(texts: Sequence[Ranks], paths: Sequence[Sequence[int]]) -> float:
    """Tokens per step of decoding `texts` (see `walked_tree`) with the tree of `paths`."""
    max_rank = 1 + max((max(path) for path in paths), default=0)
    nodes: dict[Path, int] = {(): 0}
    children = np.full((len(paths) + 1, max_rank + 1), -1)
    for path in sorted(map(tuple, paths), key=len):
        nodes[path] = len(nodes)
        children[nodes[path[:-1]], path[-1]] = nodes[path]
    walks = _Walks(texts, max_rank)
    return walks.tau(children, max((len(path) for path in paths), default=0))


class _Walks:
    """All texts side by side, to be walked at once."""

    def __init__(self, texts: Sequence[Ranks], max_rank: int) -> None:
        if not any(len(text) for text in texts):
            raise ValueError("there are no positions to choose a tree by: give longer texts")
        num_heads = texts[0].shape[1]
        longest = max(len(text) for text in texts)
        self.lengths = np.array([len(text) for text in texts])  # [S]
        self.ranks = np.full((len(texts), longest, num_heads), max_rank)  # [S, L, K]
        for row, text in enumerate(texts):
            self.ranks[row, : len(text)] = np.minimum(text, max_rank)

    def tau(self, children: npt.NDArray[np.integer], depth: int) -> float:
        """Tokens per step with a tree of at most ``depth``; ``children`` is [N, R + 1]."""
        rows = np.arange(len(self.lengths))
        at = np.zeros_like(rows)
        steps = 0
        while len(rows := rows[at[rows] < self.lengths[rows]]):
            here = self.ranks[rows, at[rows]]  # [S', K]
            node = np.zeros_like(rows)
            accepted = np.zeros_like(rows)
            for head in range(depth):
                node = np.where(node < 0, -1, children[node, here[:, head]])
                accepted += node >= 0
            at[rows] += 1 + accepted
            steps += len(rows)
        return float(at.sum() / steps)
