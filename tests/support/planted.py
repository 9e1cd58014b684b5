"""An oracle proposer: it plants the plain engine's tokens on random tree paths.

Trained heads rarely accept long paths off the first branch; this makes every step do so, which
moves KV. The rest of the tree is filled with random tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from support.runner import ON_V2
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.dynamic import DynamicTree


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

    def output(request: Any) -> Sequence[int]:
        return known[tuple(request.prompt_token_ids)]

    with _planting(output, vocab, seed, miss) as moves:
        yield moves


@contextmanager
def planted_by_seed(
    outputs: Mapping[int, Sequence[int]], vocab: int, seed: int = 0, miss: float = 0.1
) -> Iterator[list[int]]:
    """The same for requests identified by their sampling seed; others are unchanged."""

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

    def drafts_of(request: Any, tree: TokenTree) -> list[int] | None:
        """Drafts in node order, or None to keep those of the heads."""
        if not (known := output(request)):
            return None
        return _plant(tree, known[len(request.output_token_ids) :], rng, vocab, miss, moves)

    with (_planting_on_v2 if ON_V2 else _planting_on_v1)(drafts_of):
        yield moves


DraftsOf = Callable[[Any, TokenTree], list[int] | None]


@contextmanager
def _planting_on_v1(drafts_of: DraftsOf) -> Iterator[None]:
    from vllm_medusa.worker.v1.runner import MedusaModelRunner

    original = MedusaModelRunner.propose_draft_token_ids

    def propose(self: Any, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, scheduler_output, sampled, *args, **kwargs)
        for index, req_id in enumerate(self.input_batch.req_ids):
            if not drafts[index]:
                continue
            tree = self._options.tree
            if isinstance(tree, DynamicTree):
                kept = self.trees.parents[self._slots[req_id], 1 : 1 + len(drafts[index])]
                tree = _of_parents(kept.tolist())
            planted = drafts_of(self.requests[req_id], tree)
            if planted is not None:
                drafts[index] = planted[: len(drafts[index])]
        return drafts

    MedusaModelRunner.propose_draft_token_ids = propose
    try:
        yield
    finally:
        MedusaModelRunner.propose_draft_token_ids = original


@contextmanager
def _planting_on_v2(drafts_of: DraftsOf) -> Iterator[None]:
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_medusa.worker.v2.speculator import TreeSpeculator

    sample_tokens, original = GPUModelRunner.sample_tokens, TreeSpeculator.propose
    running: list[Any] = []  # the runner whose speculator is called

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[:] = [self]
        return sample_tokens(self, *args, **kwargs)

    def propose(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, batch, *args, **kwargs)
        states, sampler = running[0].req_states, running[0].sampler
        num_sampled = args[4]
        for index, slot in enumerate(batch.idx_mapping_np):
            if not num_sampled[index]:
                continue
            prompt, end = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
            tokens = states.all_token_ids.gpu[slot, :end].tolist()
            seed = sampler.sampling_states.seeds
            request = SimpleNamespace(
                prompt_token_ids=tokens[:prompt],
                output_token_ids=tokens[prompt:],
                sampling_params=SimpleNamespace(seed=int(seed.np[slot])),
            )
            tree = self.trees.options.tree
            if isinstance(tree, DynamicTree):
                count = 0 if self._drafts is None else int(self._drafts.num_nodes[index]) - 1
                if not count:
                    continue
                kept = self.trees.parents[slot, 1 : 1 + count]
                tree = _of_parents(kept.tolist())
            planted = drafts_of(request, tree)
            if planted is not None:
                drafts[index, : len(planted)] = torch.tensor(planted)
        return drafts

    GPUModelRunner.sample_tokens, TreeSpeculator.propose = sample, propose
    try:
        yield
    finally:
        GPUModelRunner.sample_tokens, TreeSpeculator.propose = sample_tokens, original


def _of_parents(parents: Sequence[int]) -> TokenTree:
    """The tree with these parents; a child's rank is its index among its siblings."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(parents):
        paths.append((*paths[parent], list(parents[:node]).count(parent)))
    return TokenTree(tuple(paths[1:]))


def leaf_paths(tree: TokenTree) -> list[list[int]]:
    """The nodes from below the root to each leaf, leaves in node order."""
    down: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents[1:], 1):
        down.append([*down[parent], node])
    return [down[leaf] for leaf in sorted(set(range(tree.num_nodes)) - set(tree.parents))]


def _plant(
    tree: TokenTree,
    future: Sequence[int],
    rng: random.Random,
    vocab: int,
    miss: float,
    moves: list[int],
) -> list[int]:
    tokens = [rng.randrange(vocab) for _ in range(tree.num_nodes)]
    path = rng.choice(leaf_paths(tree))
    for node, token in zip(path, future, strict=False):
        tokens[node] = token if rng.random() >= miss else (token + 1) % vocab
    moves.append(int(path != list(range(1, len(path) + 1))))
    return tokens[1:]
