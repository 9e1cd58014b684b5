"""Trees for given heads: which nodes a budget is best spent on.

What decides is how many tokens a verification step yields, so text that the target wrote is walked
as decoding would walk it (`walks`). Shares of positions at which a path would have been right
mislead: they count positions that decoding never stops at, and after an accepted token the next
head is right far less often than its average says (`independence` builds the tree that such
averages suggest).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_medusa.calibration.walks import Ranks, Walks
from vllm_medusa.tree.topology import Path


def walked_tree(
    texts: Sequence[Ranks], num_draft_tokens: int, max_rank: int, max_depth: int | None = None
) -> tuple[list[Path], list[float]]:
    """Grow a tree node by node, each time by the one that makes the walks shortest.

    Args:
        texts: for each text, the rank [T, K] (0 = best) that every head, standing at position t,
            gave to the token it had to foretell; negative if there is none.
        num_draft_tokens: nodes wanted, root excluded; fewer come back when the heads offer no more.
        max_rank: choices of a head that may be used, 0 to ``max_rank - 1``.
        max_depth: heads that may be used; None: all.

    Returns:
        The paths, best first, parents first: every prefix is the tree of its size. And for each
        prefix the tokens per step of the walks, tau.

    Candidates are the next choice below every node; ties go to the shallower, then the lower path.

    """
    paths: list[Path] = []
    taus: list[float] = []
    for path, tau in grow(texts, max_rank, max_depth):
        if len(paths) == num_draft_tokens:
            break
        paths.append(path)
        taus.append(tau)
    return paths, taus


def grow(
    texts: Sequence[Ranks], max_rank: int, max_depth: int | None = None
) -> Iterator[tuple[Path, float]]:
    """Yield the nodes of `walked_tree` one by one, each with the tau of the tree up to it."""
    walks = Walks(texts)
    deepest = walks.num_heads if max_depth is None else min(max_depth, walks.num_heads)
    widths: dict[Path, int] = {(): 0}  # children of each node so far
    while True:
        leaves = [
            (*path, width)
            for path, width in widths.items()
            if len(path) < deepest and width < max_rank
        ]
        if not leaves:
            return
        taus = walks.tau_with(leaves)
        negative_tau, _, leaf = min(
            (-tau, len(leaf), leaf) for tau, leaf in zip(taus, leaves, strict=True)
        )
        walks.add(leaf)
        widths[leaf[:-1]] += 1
        widths[leaf] = 0
        yield leaf, -negative_tau


def walk_tau(texts: Sequence[Ranks], paths: Sequence[Sequence[int]]) -> float:
    """Tokens per step of decoding `texts` (see `walked_tree`) with the tree of `paths`."""
    return walk_taus(texts, sorted(map(tuple, paths), key=len), [len(paths)])[0]


def walk_taus(
    texts: Sequence[Ranks], paths: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[float]:
    """Tokens per step with the first n draft nodes of ``paths``, parents first, for every size n.

    ``sizes`` ascend; sizes beyond the tree are those of the whole tree.
    """
    walks = Walks(texts)
    taus = []
    for size in sizes:
        for path in paths[len(walks.paths) - 1 : size]:
            walks.add(tuple(path))
        taus.append(walks.tau())
    return taus
