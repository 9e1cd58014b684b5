"""Hydra in trees: every node's choices are those of a dense pass over the node's own path."""

import pytest
import torch
from support.hydra import dense_logits, random_hydra

from vllm_medusa.proposer.steps import HydraStep, propose_tree
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.dynamic import Beam, DynamicTree

HIDDEN, VOCAB, K, BATCH = 16, 60, 4, 2
TREES = [
    TokenTree.dense([3, 2, 2, 1]),
    TokenTree.chain(4),
    DynamicTree(Beam(4, 5, K), 20),
    DynamicTree(Beam(3, 3, K), 9, (0.5, 1.0, 1.5, 2.0)),
]


def setting():
    heads = random_hydra(K, 2, HIDDEN, VOCAB)
    generator = torch.Generator().manual_seed(3)
    embedding, lm_head = torch.randn(2, VOCAB, HIDDEN, generator=generator).unbind()
    heads.use_target_embedding(embedding)
    states = torch.randn(BATCH, HIDDEN, generator=generator)
    return heads, states, torch.tensor([5, 17]), embedding, lm_head


def paths(drafts, root, row):
    """Each node's tokens from the root on."""
    found = [[int(root[row])]]
    for node in range(1, int(drafts.num_nodes[row])):
        found.append([*found[int(drafts.parents[row, node])], int(drafts.token_ids[row, node])])
    return found


def disagreements(tree):
    """Number of nodes that are not a choice of a dense pass over their parent's path."""
    heads, states, root, embedding, lm_head = setting()
    drafts = propose_tree(heads, states, root, tree, lambda x: x @ lm_head.T)
    wrong = nodes = 0
    for row in range(BATCH):
        found = paths(drafts, root, row)
        children = {}
        for node, path in enumerate(found[1:], 1):
            children.setdefault(int(drafts.parents[row, node]), []).append(path[-1])
        for parent, given in children.items():
            logits = dense_logits(heads, states[row], found[parent], embedding, lm_head)
            best = logits.topk(len(given)).indices.tolist()
            wrong += len(set(given) - set(best))
            nodes += len(given)
    return wrong, nodes


@pytest.mark.parametrize("tree", TREES, ids=["dense", "chain", "dynamic", "sharpened"])
def test_nodes_equal_a_dense_pass_over_their_path(tree):
    wrong, nodes = disagreements(tree)
    assert wrong == 0 and nodes == BATCH * (tree.num_nodes - 1)


def test_a_siblings_token_is_detected(monkeypatch):
    """A head that reads its sibling's branch gives other choices."""
    expand = HydraStep.expand

    def wrong(self, level, tokens, parents, width):
        return expand(self, level, tokens.roll(1, 1), parents, width)

    monkeypatch.setattr(HydraStep, "expand", wrong)
    wrong, nodes = disagreements(TREES[0])
    assert wrong > nodes // 4
