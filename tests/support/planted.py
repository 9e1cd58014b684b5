"""Drafts that no heads would choose: planted tokens, planted copies, random topologies.

Trained heads rarely accept long paths off the first branch. `planted` puts the plain engine's
tokens on random tree paths, so that every step accepts such a path, which moves KV. The rest of the
tree is filled with random tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from support.after_drafting import Drafted, after_drafting
from vllm_medusa.lookup import lookup
from vllm_medusa.lookup.search import AGREEMENTS
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.draft_trees import DraftTrees

_LAST = 6  # tokens that identify a position in a text


@contextmanager
def planted(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    miss: float = 0.1,
) -> Iterator[list[int]]:
    """Within the block every runner with trees drafts ``outputs`` on a random leaf path.

    With probability ``miss`` a planted token is wrong, so that walks also stop at inner nodes.
    Yields a list that records, per request and step, whether the planted path has its slots
    in order (0) or must be moved (1).
    """
    known = {tuple(p): list(o) for p, o in zip(prompts, outputs, strict=True)}
    with _planting(lambda request: known[tuple(request.prompt)], vocab, 0, miss) as moves:
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
    tree: TokenTree, future: Sequence[int], tokens: Sequence[int], rng: random.Random, miss: float
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


class PlantedCopies:
    """Replaces what lookup finds by the continuations of known texts, which are sometimes wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], shift: int = 0) -> None:
        """Store complete ``texts``; planted tokens are ``shift`` positions off."""
        self._rng, self._shift = random.Random(0), shift
        self._after = {
            tuple(text[end - _LAST : end]): list(text[end:])
            for text in texts
            for end in range(_LAST, len(text))
        }

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(lookup, "continuations", self._of_batch)

    def _of_batch(self, texts: Any, rows: Any, lengths: Any, count: int) -> tuple[Any, ...]:
        matched, found = np.zeros(len(rows), np.int64), np.full((len(rows), count), -1)
        for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            future = self._after.get(tuple(texts[row, length - _LAST : length].tolist()))
            if future is not None:
                future = future[self._shift :][:count]
                tokens = [token if self._rng.random() < 0.98 else 3 for token in future]
                matched[place], found[place, : len(tokens)] = 20, tokens
        all_agree = np.full_like(found, AGREEMENTS - 1)
        if isinstance(texts, torch.Tensor):
            return tuple(map(torch.from_numpy, (matched, found, all_agree)))
        return matched, found, all_agree


def random_topologies(patch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Random parents-first candidates, new ones for every request and step; returns them all."""
    generator = torch.Generator().manual_seed(0)
    seen: set[tuple[int, ...]] = set()

    def best(self: DraftTrees, num_nodes: int) -> DraftTrees:
        place = torch.rand(self.log_survival.shape, generator=generator)
        for node in range(1, place.shape[1]):  # no node before its parent
            above = place.gather(1, self.parents[:, node, None]).squeeze(1)
            place[:, node] = torch.maximum(place[:, node], above)
        place[:, 0] = -1
        order = place.masked_fill(self.log_survival.isinf(), 2.0).sort(dim=-1, stable=True).indices
        seen.update(map(tuple, order[:, :num_nodes].tolist()))
        return self.nodes(order[:, :num_nodes]).padded(num_nodes)

    patch.setattr(DraftTrees, "best", best)
    return seen
