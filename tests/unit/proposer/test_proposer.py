import pytest
import torch

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer.build import fill_tree
from vllm_medusa.proposer.choices import read_choices
from vllm_medusa.proposer.steps import propose_tree
from vllm_medusa.tree.topology import TokenTree

TREES = {
    "chain": TokenTree.chain(3),
    "dense": TokenTree.dense([3, 2, 2]),
    "sparse": TokenTree.from_paths([(0,), (4,), (0, 0), (4, 1), (0, 0, 2)]),
}


class Marginals:
    def __init__(self, logits, token_map=None):
        self.logits, self.token_map = logits, token_map

    def marginals(self, depth, width):
        return read_choices(self.logits[:, :depth], width, token_map=self.token_map)


def propose(logits, tree, token_map=None):
    roots = torch.zeros(len(logits), dtype=torch.int64)
    return fill_tree(Marginals(logits, token_map), tree, roots).token_ids


@pytest.mark.parametrize("name", TREES)
def test_every_node_has_its_heads_token_of_its_rank(name):
    tree = TREES[name]
    logits = torch.randn(4, 5, 30, generator=torch.Generator().manual_seed(1))
    tokens = propose(logits, tree)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (4, tree.num_nodes)
    for row in range(4):
        for node, path in enumerate(tree.paths, start=1):
            scores = logits[row, len(path) - 1].tolist()
            best = sorted(range(30), key=lambda token: (-scores[token], token))
            assert tokens[row, node] == best[path[-1]]


def test_token_map_gives_target_ids():
    token_map = torch.tensor([7, 99, 3])
    logits = torch.tensor([[[0.0, 2.0, 1.0]]])
    tree = TokenTree.dense([3])
    assert propose(logits, tree, token_map)[:, 1:].tolist() == [[99, 3, 7]]


ROOTS = torch.zeros(3, dtype=torch.int64)


def test_draft_runs_only_the_heads_the_tree_uses():
    heads = MedusaHeads(4, 1, 8, 20)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(3, 8)
    tree = TokenTree.dense([2, 2])
    seen = []
    heads.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    with torch.no_grad():
        tokens = propose_tree(heads, hidden, ROOTS, tree).token_ids
        logits = heads.compute_logits(heads(hidden))
        expected = propose(logits, tree)
    assert seen[0] == (3, 2, 8)
    assert torch.equal(tokens, expected)


def test_draft_uses_the_targets_lm_head_and_the_token_map():
    heads = MedusaHeads(2, 1, 8, 20, num_lm_heads=0, token_map=torch.tensor([4, 11, 2]))
    weight = torch.randn(20, 8, generator=torch.Generator().manual_seed(3))
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    tree = TokenTree.chain(2)
    tokens = propose_tree(heads, hidden, ROOTS, tree, lambda rows: rows @ weight.T).token_ids
    best = (hidden @ weight.T)[:, [4, 11, 2]].argmax(1)
    expected = torch.tensor([4, 11, 2])[best]
    assert torch.equal(tokens[:, 1:], torch.stack([expected, expected], 1))


def test_a_tree_wider_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="k is 6; there are only 5 tokens"):
        propose(torch.zeros(1, 2, 5), TokenTree.dense([6]))
