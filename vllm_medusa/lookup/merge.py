r"""A continuation and a draft tree as one tree.

The continuation is a chain below the root. As far as its tokens are nodes of the tree, these are
shared and as sure as the surer of the two says; the rest hangs below the last shared node.

    tree   0          chain  x y z      both   0
          / \                                 / \
         x   w                               x   w        x is shared
         |                                  / \
         v                                 v   y
                                                \
                                                 z
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_medusa.lookup.search import Ints

BY_TREE, BY_BOTH, BY_CHAIN = 0, 1, 2  # who proposed a node


@dataclass(frozen=True, eq=False)
class DraftTree:
    """N nodes of a request, best first, parents before their children; node 0 is the root."""

    token_ids: Ints  # [N], the root's unread
    parents: Ints  # [N], -1 for the root
    survival: npt.NDArray[np.float64]  # [N], 1 for the root, not increasing
    proposed_by: npt.NDArray[np.uint8]  # [N]

    @classmethod
    def of(cls, token_ids: Ints, parents: Ints, survival: npt.ArrayLike) -> DraftTree:
        """A tree that no chain has joined; the root is among its nodes."""
        values = np.asarray(survival, np.float64)
        return cls(token_ids, parents, values, np.zeros(len(token_ids), np.uint8))

    @property
    def num_copied(self) -> int:
        """Nodes of the chain, shared ones too: they are a path from the root."""
        return int(np.count_nonzero(self.proposed_by))


ROOT = DraftTree.of(np.zeros(1, np.int64), np.full(1, -1), [1.0])


def merge(tree: DraftTree, chain: Ints, survival: npt.NDArray[np.floating], most: int) -> DraftTree:
    """The best ``most`` drafts of ``tree`` and a chain with falling ``survival``.

    A child is never surer than its parent, and comes behind it where both are as sure.
    """
    path = _follow(tree, chain)
    shared, nodes = len(path), len(tree.token_ids)
    values = tree.survival.copy()
    values[path] = np.maximum(values[path], survival[:shared])
    by = tree.proposed_by.copy()
    by[path] = BY_BOTH
    new = len(chain) - shared
    below = np.arange(nodes - 1, nodes - 1 + new)  # each below the one before
    below[:1] = path[-1] if path else 0
    tokens = np.concatenate([tree.token_ids, chain[shared:]])
    parents = np.concatenate([tree.parents, below])
    values = np.concatenate([values, survival[shared:]])
    by = np.concatenate([by, np.full(new, BY_CHAIN, np.uint8)])
    order = np.argsort(-values, kind="stable")[: most + 1]
    place = np.zeros(len(values), np.int64)
    place[order] = np.arange(len(order))
    parents = place[parents[order]]
    parents[0] = -1
    return DraftTree(tokens[order], parents, values[order], by[order])


def _follow(tree: DraftTree, chain: Ints) -> list[int]:
    """The nodes that the chain's first tokens are, level by level."""
    path: list[int] = []
    for token in chain:
        same = (tree.parents == (path[-1] if path else 0)) & (tree.token_ids == token)
        if not same.any():
            break
        path.append(int(same.argmax()))
    return path
