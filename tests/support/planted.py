"""A proposer that knows the future: it plants the plain engine's tokens on random tree paths.

Trained heads rarely accept long paths off the first branch; this makes every step do so, which is
what moves KV. The rest of the tree is filled with random tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_medusa.tree import TokenTree
from vllm_medusa.worker.v1.runner import MedusaModelRunner


@contextmanager
def planted(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    seed: int = 0,
    miss: float = 0.1,
) -> Iterator[list[int]]:
    """Within the block every Medusa runner drafts what ``outputs`` say, on a random leaf path.

    With probability ``miss`` a planted token is wrong, so that walks also stop at inner nodes.
    Yields a list that collects, per request and step, whether the planted path leaves the slots
    in order (0) or has to be moved (1).
    """
    known = {tuple(p): list(o) for p, o in zip(prompts, outputs, strict=True)}

    def output(request: Any) -> Sequence[int]:
        return known[tuple(request.prompt_token_ids)]

    with _planting(output, vocab, seed, miss) as moves:
        yield moves


@contextmanager
def planted_by_seed(
    outputs: Mapping[int, Sequence[int]], vocab: int, seed: int = 0, miss: float = 0.1
) -> Iterator[list[int]]:
    """The same for requests told apart by their own sampling seed; others are left alone."""

    def output(request: Any) -> Sequence[int]:
        return outputs.get(request.sampling_params.seed, ())

    with _planting(output, vocab, seed, miss) as moves:
        yield moves


@contextmanager
def _planting(
    output: Callable[[Any], Sequence[int]], vocab: int, seed: int, miss: float
) -> Iterator[list[int]]:
    rng = random.Random(seed)
    moves: list[int] = []
    original = MedusaModelRunner.propose_draft_token_ids

    def propose(self: Any, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, scheduler_output, sampled, *args, **kwargs)
        tree: TokenTree = self._options.tree
        for index, req_id in enumerate(self.input_batch.req_ids):
            request = self.requests[req_id]
            if not drafts[index] or not (known := output(request)):
                continue
            future = known[len(request.output_token_ids) :]
            drafts[index] = _plant(tree, future, rng, vocab, miss, moves)[: len(drafts[index])]
        return drafts

    MedusaModelRunner.propose_draft_token_ids = propose
    try:
        yield moves
    finally:
        MedusaModelRunner.propose_draft_token_ids = original


def _plant(
    tree: TokenTree,
    future: Sequence[int],
    rng: random.Random,
    vocab: int,
    miss: float,
    moves: list[int],
) -> list[int]:
    tokens = [rng.randrange(vocab) for _ in range(tree.num_nodes)]
    path = rng.choice(tree.retrieval)[1:]
    for node, token in zip(path, future, strict=False):
        tokens[node] = token if rng.random() >= miss else (token + 1) % vocab
    moves.append(int(list(path) != list(range(1, len(path) + 1))))
    return tokens[1:]
