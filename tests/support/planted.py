"""An oracle proposer: it plants the plain engine's tokens on random tree paths.

Trained heads rarely accept long paths off the first branch; this makes every step do so, which
moves KV. The rest of the tree is filled with random tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from support.after_drafting import Drafted, after_drafting
from vllm_medusa.tree import TokenTree


@contextmanager
def planted(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    seed: int = 0,
    miss: float = 0.1,
) -> Iterator[list[int]]:
    """Within the block every runner with trees drafts ``outputs`` on a random leaf path.

    With probability ``miss`` a planted token is wrong, so that walks also stop at inner nodes.
    Yields a list that records, per request and step, whether the planted path has its slots
    in order (0) or must be moved (1).
    """
    known = {tuple(p): list(o) for p, o in zip(prompts, outputs, strict=True)}
    with _planting(lambda request: known[tuple(request.prompt)], vocab, seed, miss) as moves:
        yield moves


@contextmanager
def planted_by_seed(
    outputs: Mapping[int, Sequence[int]], vocab: int, seed: int = 0, miss: float = 0.1
) -> Iterator[list[int]]:
    """The same for requests identified by their sampling seed; others are unchanged."""
    with _planting(lambda r: outputs.get(r.params.seed, ()), vocab, seed, miss) as moves:
        yield moves


@contextmanager
def _planting(
    output: Callable[[Drafted], Sequence[int]], vocab: int, seed: int, miss: float
) -> Iterator[list[int]]:
    rng = random.Random(seed)
    moves: list[int] = []

    def look(request: Drafted) -> list[int] | None:
        if request.tree is None or not (known := output(request)):
            return None
        future = known[len(request.output) :]
        drafts, moved = plant(request.tree, future, range(vocab), rng, miss)
        moves.append(int(moved))
        return drafts

    with after_drafting(look):
        yield moves


def plant(
    tree: TokenTree,
    future: Sequence[int],
    tokens: Sequence[int],
    rng: random.Random,
    miss: float,
) -> tuple[list[int], bool]:
    """Drafts: ``future`` on a random leaf's path, any ``tokens`` elsewhere; and if it has to move.

    With probability ``miss`` a token of the path is another one.
    """
    drafts = [rng.choice(tokens) for _ in range(tree.num_nodes)]
    path = rng.choice(_leaf_paths(tree))
    for node, token in zip(path, future, strict=False):
        if rng.random() >= miss:
            drafts[node] = token
    return drafts[1:], path != list(range(1, len(path) + 1))


def _leaf_paths(tree: TokenTree) -> list[list[int]]:
    """The nodes from below the root to each leaf, leaves in node order."""
    down: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents[1:], 1):
        down.append([*down[parent], node])
    return [down[leaf] for leaf in sorted(set(range(tree.num_nodes)) - set(tree.parents))]
