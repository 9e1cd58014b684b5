"""Tree search for given heads: the best nodes for a budget.

What counts is how many tokens a verification step yields, so text that the target wrote is walked
as decoding would walk it (`walks`). Products of the heads' average accuracies mislead: they count
positions that decoding never stops at, and after an accepted token the next head is right far less
often than its average says.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_medusa.calibration.walks import Ranks, Walks
from vllm_medusa.tree.topology import Path


def walked_tree(
    texts: Sequence[Ranks], num_draft_tokens: int, max_rank: int, max_depth: int | None = None
) -> list[Path]:
    """Grow a tree greedily by the node that shortens the walks of ``texts`` most.

    It has ``num_draft_tokens`` nodes, fewer when the heads offer no more: choices 0 to
    ``max_rank - 1`` of the first ``max_depth`` heads (None: all). Candidates are the next choice
    below every node; ties go to the shallower, then the lower path.

    Returns the paths, best first, parents first: every prefix is the tree of its size.
    """
    walks = Walks(texts)
    deepest = walks.num_heads if max_depth is None else min(max_depth, walks.num_heads)
    widths: dict[Path, int] = {(): 0}  # children of each node so far
    while len(walks.paths) <= num_draft_tokens:
        leaves = [
            (*path, width)
            for path, width in widths.items()
            if len(path) < deepest and width < max_rank
        ]
        if not leaves:
            break
        candidates = zip(walks.tau_with(leaves), leaves, strict=True)
        *_, leaf = min((-tau, len(leaf), leaf) for tau, leaf in candidates)
        walks.add(leaf)
        widths[leaf[:-1]] += 1
        widths[leaf] = 0
    return walks.paths[1:]


def walk_taus(texts: Sequence[Ranks], paths: Sequence[Path], sizes: Sequence[int]) -> list[float]:
    """Tokens per step with the first n draft nodes of ``paths``, parents first, for every size n.

    ``sizes`` ascend; sizes beyond the tree are those of the whole tree.
    """
    walks = Walks(texts)
    taus = []
    for size in sizes:
        for path in paths[len(walks.paths) - 1 : size]:
            walks.add(path)
        taus.append(walks.tau())
    return taus
