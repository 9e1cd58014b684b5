"""Random ragged batches of trees with tokens, and the acceptance rules written as plain loops."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_medusa.tree.batch import TreeBatch


@dataclass
class Case:
    tree: TreeBatch
    token_ids: Tensor  # int64 [B, N]
    vocab_size: int

    @property
    def batch_size(self) -> int:
        return self.tree.batch_size

    def children(self, b: int, node: int) -> list[int]:
        count = int(self.tree.num_nodes[b])
        return [i for i in range(1, count) if int(self.tree.parents[b, i]) == node]

    def walk(self, b: int, choose) -> tuple[list[int], list[int]]:
        """(nodes, emitted tokens) of the token-by-token walk; ``choose(node) -> token``."""
        nodes, emitted = [0], []
        while True:
            token = choose(nodes[-1])
            emitted.append(token)
            hits = [c for c in self.children(b, nodes[-1]) if int(self.token_ids[b, c]) == token]
            if not hits:
                return nodes, emitted
            nodes.append(hits[0])


def random_parents(nodes: int, generator: torch.Generator, shape: str = "random") -> list[int]:
    """Parents first: "random", "deep" (long branches), "chain", "star" or "pairs" (binary)."""
    parents = [-1]
    for i in range(1, nodes):
        first = {"deep": max(0, i - 3), "chain": i - 1, "pairs": (i - 1) // 2}.get(shape, 0)
        last = {"star": 0, "pairs": first}.get(shape, i - 1)
        parents.append(int(torch.randint(first, last + 1, (), generator=generator)))
    return parents


def make_case(seed: int, batch: int, max_nodes: int, vocab: int, deep: bool = False) -> Case:
    """Every request gets its own tree; padding nodes hold plausible garbage."""
    rng = random.Random(seed)
    generator, shape = torch.Generator().manual_seed(seed), "deep" if deep else "random"
    parents = torch.tensor([random_parents(max_nodes, generator, shape) for _ in range(batch)])
    num_nodes = torch.tensor([rng.randint(1, max_nodes) for _ in range(batch)])
    tree = TreeBatch.from_parents(parents, num_nodes, max_nodes - 1)
    depth = int(tree.depths.max()) + rng.randint(0, 1)  # an upper bound, not always reached
    tree = replace(tree, max_depth=depth)
    token_ids = torch.tensor(
        [[rng.randrange(vocab) for _ in range(max_nodes)] for _ in range(batch)]
    )
    return Case(tree, token_ids, vocab)


def padded(values: list[int], length: int, fill: int) -> list[int]:
    return values + [fill] * (length - len(values))
