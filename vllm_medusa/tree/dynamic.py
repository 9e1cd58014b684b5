"""Static parameters of dynamic trees: the candidate nodes, and the max number to choose."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from vllm_medusa.tree.topology import MAX_NODES, NodePath, TokenTree

MOST_DRAFTS = 63  # per request with an automatic budget
BEAM_WIDTH = 10  # nodes expanded per level, and choices of each (EAGLE-2's)

# Assumed accuracy of a head's best, second ... choice, and its decay per head: typical values. They
# only determine which nodes are in the pool.
_BY_RANK = (0.5, 0.12, 0.06, 0.04, 0.03, 0.024, 0.02, 0.017, 0.014, 0.012)
_NEXT_HEAD = 0.85


@dataclass(frozen=True)
class Beam:
    """The beam of a branching drafter, used instead of a pool; see `build_tree`."""

    width: int  # k, nodes expanded per level
    choices: int  # K, below each expanded node
    depth: int  # levels

    @property
    def num_nodes(self) -> int:
        """Candidates, root included."""
        return 1 + self.choices * sum(map(self.width_at, range(self.depth)))

    def width_at(self, level: int) -> int:
        """Number of nodes expanded at a level; 1 for the root."""
        return 1 if level == 0 else min(self.width, self.choices * self.width_at(level - 1))

    def within(self, num_drafts: int) -> Beam:
        """The part that can contain the best ``num_drafts`` drafts."""
        return Beam(*(min(each, num_drafts) for each in (self.width, self.choices, self.depth)))


@dataclass(frozen=True)
class DynamicTree:
    """Used instead of a static `TokenTree`: each request drafts the best part of `pool`."""

    pool: TokenTree | Beam  # empty: there is no drafter
    num_nodes: int  # max verified nodes per request, root included
    sharpness: tuple[float, ...] | None = None  # factor on each head's logits; None: 1

    @property
    def num_draft_tokens(self) -> int:
        """Max nodes to propose, without the root."""
        return self.num_nodes - 1

    @property
    def top_limit(self) -> int:
        """Number of drafts per request beyond which drafting takes no more time.

        A head runs for each depth; a beam expands more nodes for more drafts, up to its width.
        """
        if isinstance(self.pool, Beam):
            return self.pool.width * max(self.pool.depth - 1, 1)
        return self.max_depth

    @property
    def max_depth(self) -> int:
        """Depth of the deepest candidate: the number of heads or levels that run at most."""
        return self.pool.depth if isinstance(self.pool, Beam) else self.pool.max_depth


def widest_pool(num_heads: int, num_ranks: int, num_nodes: int = MAX_NODES) -> TokenTree:
    """The pool for heads: the ``num_nodes - 1`` most probable paths, best first.

    Args:
        num_heads: Max levels.
        num_ranks: Max choices of a head, at least 1.
        num_nodes: Max nodes of the pool, root included.

    """

    def log_chance(head: int, rank: int) -> float:
        return math.log(_BY_RANK[rank]) + head * math.log(_NEXT_HEAD)

    num_ranks = min(num_ranks, len(_BY_RANK))
    paths: list[NodePath] = []
    queue: list[tuple[float, NodePath]] = [(-log_chance(0, 0), (0,))]
    while queue and len(paths) < num_nodes - 1:
        loss, path = heapq.heappop(queue)
        paths.append(path)
        head, rank = len(path) - 1, path[-1]
        if rank + 1 < num_ranks:
            sibling = loss + log_chance(head, rank) - log_chance(head, rank + 1)
            heapq.heappush(queue, (sibling, (*path[:-1], rank + 1)))
        if len(path) < num_heads:
            heapq.heappush(queue, (loss - log_chance(head + 1, 0), (*path, 0)))
    return TokenTree(tuple(paths))
