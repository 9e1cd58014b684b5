"""Drafted trees: the best nodes of the pool are a tree, and every truncation is a prefix."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.proposer.build import of_pool
from vllm_medusa.proposer.choices import Choices
from vllm_medusa.tree import MAX_NODES, TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.draft_trees import FROM_DRAFTER, DraftTrees
from vllm_medusa.tree.dynamic import widest_pool

TREE = widest_pool(num_heads=4, num_ranks=6, num_nodes=80)
POOL = TreeTensors.from_tree(TREE)
seeds = st.integers(0, 2**32 - 1)


def confidences(seed: int, batch: int = 3) -> torch.Tensor:
    """Log-confidences [B, D, width] with many ties, some certain, some impossible."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 5, (batch, TREE.max_depth, POOL.width), generator=generator)
    values = torch.tensor([0.0, -0.1, -0.1 - 1e-7, -2.0, -float("inf")])
    return values[steps]


def candidates(log_confidence: torch.Tensor) -> DraftTrees:
    """Token ids encode the index of their confidence."""
    places = torch.arange(log_confidence[0].numel()).view_as(log_confidence[0])
    return of_pool(Choices(places.expand_as(log_confidence), log_confidence), POOL)


def pool_nodes(drafts: DraftTrees) -> list[list[int]]:
    """The nodes of the pool that the drafts correspond to, by their paths of tokens."""
    places = {}
    for node, path in enumerate(TREE.paths, 1):
        places[tuple(depth * POOL.width + rank for depth, rank in enumerate(path))] = node
    rows = []
    for tokens, parents in zip(drafts.token_ids.tolist(), drafts.parents.tolist(), strict=True):
        paths = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        rows.append([0, *(places[path] for path in paths[1:])])
    return rows


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
    found = candidates(log_confidence).best(num_nodes)
    for row, nodes in enumerate(pool_nodes(found)):
        assert nodes == best_first(log_confidence[row], num_nodes)
        TokenTree(tuple(TREE.paths[node - 1] for node in nodes[1:]))  # parents first, no orphan
    assert (found.log_survival[:, 1:] <= found.log_survival[:, :-1]).all()
    assert (found.source == FROM_DRAFTER).all()
    cut = found.prefix(max(1, num_nodes // 2))
    again = candidates(log_confidence).best(max(1, num_nodes // 2))
    for name, part in vars(cut).items():
        assert torch.equal(getattr(again, name), part), name


@given(seeds, st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=60)
def test_topologies_match_their_paths(seed, sizes):
    """Every request's tensors equal those of a static tree of the same paths."""
    found = candidates(confidences(seed, len(sizes))).best(max(sizes))
    batch = TreeBatch.from_parents(found.parents, torch.tensor(sizes), TREE.max_depth)
    for row, (nodes, size) in enumerate(zip(pool_nodes(found), sizes, strict=True)):
        paths = tuple(TREE.paths[node - 1] for node in nodes[1:size])
        tensors = TreeTensors.from_tree(TokenTree(paths))
        for name in ("parents", "depths"):
            assert torch.equal(getattr(batch, name)[row, :size], getattr(tensors, name)), name
        assert torch.equal(batch.ancestors[row, :size, :size], tensors.ancestors)
        bits = batch.ancestor_bits[row, :size, : tensors.ancestor_bits.shape[1]]
        assert torch.equal(bits, tensors.ancestor_bits)
    assert batch.num_nodes.tolist() == sizes


def test_limits_and_padding():
    found = candidates(confidences(2).clamp_min(-5)).best(9).padded(12)
    assert found.parents.shape == (3, 12) and found.num_nodes.tolist() == [9, 9, 9]
    assert found.limited(4).num_nodes.tolist() == [5, 5, 5]
    limited = found.limited(torch.tensor([0, 3, 99]))
    assert limited.num_nodes.tolist() == [1, 4, 9]
    assert limited.topology(TREE.max_depth).num_nodes.tolist() == [1, 4, 9]
    assert DraftTrees.roots(2, 5, "cpu").num_nodes.tolist() == [1, 1]


def test_a_static_tree_is_used_whole():
    tokens = torch.arange(2 * TREE.num_nodes).view(2, -1)
    drafts = DraftTrees.static(POOL, tokens)
    assert drafts.token_ids is tokens and drafts.num_nodes.tolist() == [TREE.num_nodes] * 2
    assert drafts.parents.tolist() == [list(TREE.parents)] * 2
    assert drafts.log_survival[:, 0].tolist() == [0.0, 0.0]
    assert (drafts.log_survival.diff(dim=1) < 0).all()


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(1, 1), (1, 50), (2, 3), (5, 10)])
def test_the_widest_pool(num_heads, num_ranks):
    tree = widest_pool(num_heads, num_ranks)
    assert tree.max_depth == num_heads and tree.num_nodes <= MAX_NODES
    assert max(tree.head_widths) == min(num_ranks, 10)
    if num_heads == 2:  # everything fits
        every = itertools.chain.from_iterable(
            itertools.product(range(num_ranks), repeat=depth) for depth in (1, 2)
        )
        assert set(tree.paths) == set(every)
