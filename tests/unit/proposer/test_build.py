"""The builder against its definition: expansion, reranking, ties, static trees of ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.proposer.build import build_tree, fill_tree
from vllm_medusa.proposer.choices import Choices
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.dynamic import Beam

BATCH, VOCAB = 2, 1000
TERMS = (0.0, -0.1, -0.1 - 1e-7, -2.0, -float("inf"))  # certain, ties, near ties, impossible


def below(seed: int, row: int, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
    """The drafter's output below a path of tokens, a function of the path only."""
    generator = torch.Generator().manual_seed(hash((seed, row, path)) % 2**31)
    terms = torch.randint(0, len(TERMS), (20,), generator=generator).sort().values[:width]
    tokens = torch.randperm(VOCAB, generator=generator)[:width]
    return [(int(t), TERMS[k]) for t, k in zip(tokens, terms, strict=True)]


class Drafter:
    """Follows slots back to each node's path, like a drafter's own state."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.paths: list[list[tuple[int, ...]]] = [[()]] * BATCH
        self.expanded: list[int] = []

    def expand(self, level, tokens, parents, width):
        assert level == len(self.expanded) and tokens.shape == parents.shape
        self.expanded.append(tokens.shape[1])
        self.paths = [
            [
                (*self.paths[row][parent], token)
                for token, parent in zip(tokens[row].tolist(), parents[row].tolist(), strict=True)
            ]
            for row in range(BATCH)
        ]
        found = torch.tensor(
            [
                [below(self.seed, row, path, width) for path in self.paths[row]]
                for row in range(BATCH)
            ],
            dtype=torch.float64,
        )
        return Choices(found[..., 0].long(), found[..., 1].float())


def by_hand(seed: int, row: int, root: int, beam: Beam, num_nodes: int, deepest: int):
    """Paths of tokens and values, best first: the definition, with lists."""
    nodes, level = [((), 0.0)], [((), 0.0)]
    for depth in range(beam.depth):
        choices = []
        for path, value in level:
            for token, term in below(seed, row, (root, *path), beam.choices):
                sum32 = float(torch.tensor(value) + torch.tensor(term))
                choices.append(((*path, token), sum32 if depth < deepest else -float("inf")))
        nodes += choices
        level = sorted(choices, key=lambda node: -node[1])[: beam.width]  # stable
    return sorted(nodes, key=lambda node: -node[1])[:num_nodes]


@given(
    st.integers(0, 2**31),
    st.builds(Beam, width=st.integers(1, 5), choices=st.integers(1, 5), depth=st.integers(1, 4)),
    st.integers(2, 40),
    st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH),
)
@settings(max_examples=80)
def test_the_best_candidates_parents_first(seed, beam, num_nodes, deepest):
    root = torch.tensor([3, 7])
    proposal = build_tree(Drafter(seed), beam, root, num_nodes, torch.tensor(deepest))
    counts = proposal.num_nodes.tolist()
    for row in range(BATCH):
        paths = [()]
        for node in range(1, counts[row]):
            parent = int(proposal.parents[row, node])
            assert 0 <= parent < node  # even if parent and child tie
            paths.append((*paths[parent], int(proposal.token_ids[row, node])))
        wanted = by_hand(seed, row, int(root[row]), beam, num_nodes, deepest[row])
        wanted = [node for node in wanted if node[1] > -float("inf")]
        assert paths == [path for path, _ in wanted]
        got = proposal.log_survival[row, : counts[row]].tolist()
        assert got == pytest.approx([value for _, value in wanted])
    assert proposal.topology(beam.depth).depths.shape == (BATCH, num_nodes)
    assert (proposal.parents[:, 0] == -1).all()


@given(st.integers(0, 2**31), st.integers(1, 12))
@settings(max_examples=30)
def test_few_drafts_need_few_nodes_expanded(seed, limit):
    """With a limit, fewer nodes are drafted, and the best ones are the same."""
    beam, root, deep = Beam(6, 8, 4), torch.tensor([1, 2]), torch.tensor([9, 9])
    drafter = Drafter(seed)
    cut = build_tree(drafter, beam, root, 20, deep, limit)
    whole = build_tree(Drafter(seed), beam, root, 20, deep)
    for name in ("token_ids", "parents", "log_survival"):
        one, other = (getattr(each, name)[:, : 1 + limit] for each in (cut, whole))
        alive = whole.log_survival[:, : 1 + limit].isfinite()
        assert torch.equal(one[alive], other[alive]), name
    assert len(drafter.expanded) <= min(4, limit) and max(drafter.expanded) <= limit


def test_only_nodes_that_can_matter_are_expanded():
    """Each level of a nearly certain chain: its siblings' children are never among 4."""
    sure = torch.tensor([0.0, -5.0, -5.0]).expand(BATCH, 1, 3)

    class Sure(Drafter):
        def expand(self, level, tokens, parents, width):
            found = super().expand(level, tokens, parents, width)
            return Choices(found.token_ids, sure.expand(-1, tokens.shape[1], -1))

    drafter, root, deep = Sure(0), torch.tensor([1, 2]), torch.tensor([9, 9])
    build_tree(drafter, Beam(3, 3, 4), root, 20, deep, 4)
    assert drafter.expanded == [1, 3, 1, 1]
    shallow = Sure(0)
    build_tree(shallow, Beam(3, 3, 4), root, 20, torch.tensor([1, 2]))
    assert shallow.expanded == [1, 3]


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree.chain(3),
        TokenTree.dense([3, 2, 2]),
        TokenTree(((0,), (0, 0), (1,), (0, 1), (1, 0), (0, 1, 0), (2,), (1, 0, 0), (0, 1, 1))),
    ],
    ids=["chain", "dense", "ragged"],
)
def test_a_static_tree_uses_each_nodes_own_choices(tree):
    root = torch.tensor([5, 6])
    got = fill_tree(Drafter(1), tree, root).token_ids
    for row, (node, path) in itertools.product(range(BATCH), enumerate(tree.paths, 1)):
        tokens = (int(root[row]),)
        for rank in path:
            tokens = (*tokens, below(1, row, tokens, 20)[rank][0])
        assert got[row, node] == tokens[-1]
