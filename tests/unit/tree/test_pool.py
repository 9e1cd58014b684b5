"""Dynamic trees: the best nodes of the pool are a tree, and the tensors say which."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.proposer.build import of_pool
from vllm_medusa.proposer.candidates import Candidates, Choices
from vllm_medusa.tree import MAX_NODES, TokenTree, TreeBatch, TreeTensors
from vllm_medusa.tree.dynamic import Beam, DynamicTree, widest_pool
from vllm_medusa.tree.pool import Pool

TREE = widest_pool(num_heads=4, num_ranks=6, num_nodes=80)
POOL = Pool.from_tree(TREE)
seeds = st.integers(0, 2**32 - 1)


def confidences(seed: int, batch: int = 3) -> torch.Tensor:
    """Log-confidences [B, D, width] with many ties, some of them certain, some impossible."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 5, (batch, TREE.max_depth, POOL.width), generator=generator)
    values = torch.tensor([0.0, -0.1, -0.1 - 1e-7, -2.0, -float("inf")])
    return values[steps]


def candidates(log_confidence: torch.Tensor) -> Candidates:
    """Tokens are what is asked of nobody here."""
    return of_pool(
        Choices(torch.zeros_like(log_confidence, dtype=torch.int64), log_confidence), POOL
    )


def best_first(log_confidence: torch.Tensor, num_nodes: int) -> list[int]:
    """The definition, with a heap: the best reachable node, ties to the lower index."""
    survival = {0: torch.tensor(0.0)}
    queue, taken = [(0.0, 0)], []
    children = {}
    for node, parent in enumerate(TREE.parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    while queue and len(taken) < num_nodes:
        _, node = heapq.heappop(queue)
        taken.append(node)
        for child in children.get(node, []):
            term = log_confidence[TREE.depths[child] - 1, TREE.ranks[child]]
            survival[child] = survival[node] + term
            heapq.heappush(queue, (-float(survival[child]), child))
    return taken


@given(seeds, st.integers(1, 80))
@settings(max_examples=60)
def test_the_best_nodes_are_a_tree_best_first(seed, num_nodes):
    log_confidence = confidences(seed)
    survival = POOL.survival(log_confidence)
    order = candidates(log_confidence).best(num_nodes)
    for row, nodes in enumerate(order.tolist()):
        assert nodes == best_first(log_confidence[row], num_nodes)
        TokenTree(tuple(TREE.paths[node - 1] for node in nodes[1:]))  # parents first, no orphan
    assert (survival.gather(1, order).diff(dim=1) <= 0).logical_not().sum() == (
        survival.gather(1, order).diff(dim=1).isnan().sum()  # -inf beside -inf
    )


@given(seeds, st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=60)
def test_trees_are_what_their_paths_say(seed, sizes):
    """Every request's tensors equal those of a static tree of the same paths."""
    found = candidates(confidences(seed, len(sizes)))
    order = found.best(max(sizes))
    parents = found.tree(max(sizes), torch.full((len(sizes),), 9)).parents
    batch = TreeBatch.from_parents(parents, torch.tensor(sizes), TREE.max_depth)
    for row, size in enumerate(sizes):
        paths = tuple(TREE.paths[node - 1] for node in order[row, 1:size].tolist())
        expected = TreeTensors.from_tree(TokenTree(paths)).batch(size, torch.tensor([size]))
        got = batch.select(torch.tensor([row])).prefix(size)
        for name in ("num_nodes", "parents", "depths", "ancestor_bits", "ancestors"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_a_prefix_of_a_batch_is_the_batch_of_prefixes():
    parents = candidates(confidences(1)).tree(70, torch.full((3,), 9)).parents
    small = TreeBatch.from_parents(parents[:, :9], torch.tensor([9, 4, 1]), TREE.max_depth)
    cut = TreeBatch.from_parents(parents, torch.tensor([9, 4, 1]), TREE.max_depth).prefix(9)
    for name in ("num_nodes", "parents", "depths", "ancestor_bits", "ancestors"):
        assert torch.equal(getattr(cut, name), getattr(small, name)), name


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(1, 1), (1, 50), (2, 3), (5, 10)])
def test_the_widest_pool(num_heads, num_ranks):
    tree = widest_pool(num_heads, num_ranks)
    assert tree.max_depth == num_heads and tree.num_nodes <= MAX_NODES
    assert max(tree.head_widths) == min(num_ranks, 10)
    if num_heads == 2:  # nothing is left out that has room
        every = itertools.chain.from_iterable(
            itertools.product(range(num_ranks), repeat=depth) for depth in (1, 2)
        )
        assert set(tree.paths) == set(every)


@pytest.mark.parametrize("pool", [TREE, Beam(width=4, choices=5, depth=3)], ids=["pool", "beam"])
def test_plain_json_is_read_back(pool):
    tree = DynamicTree(pool, 9, (1.0, 0.5))
    assert DynamicTree.from_dict(tree.to_dict()) == tree
