"""Walk texts as decoding would: the stop node of each position, and the number of steps.

A *text* has, for each position, the rank that every head gave to the token it had to predict.
Decoding with a tree starts at the first position, accepts the longest path of the tree that agrees
with the ranks there, continues after it and ends when the last position is passed:

    step at t:   accept a tokens,   next step at t + 1 + a
    tau        = tokens / steps = sum of (1 + a) / number of steps

For text that the target sampled, this is exact, not a simulation: lossless sampling
descends exactly as long as the target's sampled token is a child, and the text consists of
the sampled tokens. (For greedy decoding, walk text decoded greedily.)

`walked_tree` grows the tree that needs the fewest steps. Products of the heads' average accuracies
mislead: they count positions where no step starts, and after an accepted token the next head is
far less accurate than on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_medusa.tree.topology import NodePath

Ranks = npt.NDArray[np.integer]  # [T, K]; a negative rank means no token: a miss

_BLOCK = 1 << 22  # walkers per batch


class Walks:
    """Texts walked with a tree that grows leaf by leaf.

    All texts are concatenated, each followed by K + 1 positions at which walks stop.
    """

    def __init__(self, texts: Sequence[Ranks], paths: Iterable[NodePath] = ()) -> None:
        """Start with the tree of ``paths``, parents first; if empty, with the root.

        Raises ValueError: no text has a position.
        """
        texts = [text for text in texts if len(text)]
        if not texts:
            raise ValueError("the texts have no positions: use longer texts")
        self.num_heads = texts[0].shape[1]
        room = self.num_heads + 1
        lengths = np.array([len(text) for text in texts])
        ends = np.cumsum(lengths + room)
        self.starts = (ends - lengths - room).astype(np.int64)  # [S]
        self.ranks = np.full((int(ends[-1]), self.num_heads), -1, np.int32)  # [P, K]
        self.jumps = np.zeros(len(self.ranks), np.int32)  # [P]: 1 + depth of the stop; 0: the end
        for start, text in zip(self.starts, texts, strict=True):
            self.ranks[start : start + len(text)] = text
            self.jumps[start : start + len(text)] = 1
        self.stops = np.where(self.jumps > 0, 0, -1).astype(np.int32)  # [P]: node where each stops
        self.paths: list[NodePath] = [()]
        self._nodes: dict[NodePath, int] = {(): 0}
        for path in paths:
            self.add(path)

    def add(self, path: NodePath) -> None:
        """Add the leaf ``path``; its parent must exist."""
        parent, head = self._nodes[path[:-1]], len(path) - 1
        self._nodes[path] = len(self.paths)
        here = np.flatnonzero(self.stops == parent)
        here = here[self.ranks[here, head] == path[-1]]
        self.stops[here] = len(self.paths)
        self.jumps[here] = len(path) + 1
        self.paths.append(path)

    def tau(self) -> float:
        """Tokens per step with the current tree."""
        return float(self.jumps[self.visited()].mean())

    def tau_with(self, leaves: Sequence[NodePath]) -> list[float]:
        """Tokens per step with each of ``leaves`` alone added; no two may have the same parent.

        The texts are walked once per leaf.
        """
        accepted = np.full(len(self.stops), -1, np.int32)  # [P]: parent of the leaf accepted here
        next_rank = np.full(len(self.paths), -2, np.int32)  # [N]
        for leaf in leaves:
            next_rank[self._nodes[leaf[:-1]]] = leaf[-1]
        depths = self.jumps - 1
        inner = np.flatnonzero((depths >= 0) & (depths < self.num_heads))
        stops = self.stops[inner]
        hit = self.ranks[inner, depths[inner]] == next_rank[stops]
        accepted[inner[hit]] = stops[hit]
        parents = np.array([self._nodes[leaf[:-1]] for leaf in leaves], np.int32)[:, None]  # [L, 1]
        block = max(1, _BLOCK // len(self.starts))
        taus: list[float] = []
        for first in range(0, len(leaves), block):
            parent = parents[first : first + block]  # [C, 1]
            at = np.repeat(self.starts[None], len(parent), 0)  # [C, S]
            steps, tokens = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
            while at.shape[1]:
                jumps = self.jumps[at]
                moving = jumps > 0
                steps += moving.sum(1)
                moved = jumps + (accepted[at] == parent)
                tokens += moved.sum(1)
                at = (at + moved)[:, moving.any(0)]  # without finished texts
            taus += (tokens / steps).tolist()
        return taus

    def visits(self) -> npt.NDArray[np.int64]:
        """Number of steps that reach each node, root first: [N]; all steps reach the root."""
        stopped = np.bincount(self.stops[self.visited()], minlength=len(self.paths))
        for node in range(len(self.paths) - 1, 0, -1):  # parents come first
            stopped[self._nodes[self.paths[node][:-1]]] += stopped[node]
        return stopped

    def visited(self) -> npt.NDArray[np.int64]:
        """The positions at which steps start, as indices into `ranks`."""
        parts, at = [], self.starts
        while len(at := at[self.jumps[at] > 0]):
            parts.append(at)
            at = at + self.jumps[at]
        return np.concatenate(parts)


def walked_tree(texts: Sequence[Ranks], num_draft_tokens: int, max_rank: int) -> list[NodePath]:
    """Grow a tree greedily by the node that shortens the walks of ``texts`` most.

    It has ``num_draft_tokens`` nodes, or fewer if the heads offer fewer: choices 0 to
    ``max_rank - 1`` of each head. Candidates are the next choice below every node; ties go to the
    shallower, then the lower path.

    Returns the paths, best first, parents first: every prefix is the tree of its size.
    """
    walks = Walks(texts)
    widths: dict[NodePath, int] = {(): 0}  # children of each node so far
    while len(walks.paths) <= num_draft_tokens:
        leaves = [
            (*path, width)
            for path, width in widths.items()
            if len(path) < walks.num_heads and width < max_rank
        ]
        if not leaves:
            break
        candidates = zip(walks.tau_with(leaves), leaves, strict=True)
        *_, leaf = min((-tau, len(leaf), leaf) for tau, leaf in candidates)
        walks.add(leaf)
        widths[leaf[:-1]] += 1
        widths[leaf] = 0
    return walks.paths[1:]


def walk_taus(texts: Sequence[Ranks], paths: Iterable[NodePath]) -> list[float]:
    """Tokens per step with the first 1, 2, ... draft nodes of ``paths``, parents first."""
    walks = Walks(texts)
    taus = []
    for path in paths:
        walks.add(path)
        taus.append(walks.tau())
    return taus
