"""The walk emits the target's distribution: chi-square at 1e-6, fixed seeds; broken walks fail."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import padded
from support.tree_strategies import cases
from torch import Tensor

from vllm_medusa.sampler import lossless_walk
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

VOCAB = 4
SAMPLES = 40_000
# Including siblings with equal tokens: nodes 1 and 3 both have token 2.
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0]])
TOKENS = torch.tensor([0, 2, 1, 2, 3, 0, 3, 1])
PATHS = [(), (2,), (1,), (2,), (2, 3), (2, 0), (1, 3), (2, 1)]  # tokens from the root to each node


def excess(counts: Tensor, probs: Tensor) -> float:
    """Chi-square statistic as standard deviations of its (Wilson-Hilferty) normal equivalent."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    wanted = probs / probs.sum() * counts.sum()
    assert wanted.min() > 5, "too few expected samples for a chi-square test"
    k = len(counts) - 1
    ratio = ((counts - wanted) ** 2 / wanted).sum() / k
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5)


LIMIT = 4.75  # one-sided 1e-6


class Target:
    """p(next | up to two tokens) over a small vocabulary, and three tokens sampled with a walk."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = torch.softmax(0.7 * torch.randn(VOCAB), -1)
        self.second = torch.softmax(0.7 * torch.randn(VOCAB, VOCAB), -1)
        self.third = torch.softmax(0.7 * torch.randn(VOCAB, VOCAB, VOCAB), -1)

    def given(self, path: tuple[int, ...]) -> Tensor:
        return (self.first, self.second, self.third)[len(path)][path]

    def joint(self) -> Tensor:
        return self.first[:, None, None] * self.second[:, :, None] * self.third  # [V, V, V]

    def emit(self, walk_tree: TreeBatch) -> Tensor:
        """[S, 3] tokens: one step of the walk, then plain sampling up to three tokens."""
        rows = torch.stack([self.given(path) for path in PATHS])  # [N, V] as the scorer sees it

        def sample(level: int, nodes: Tensor, active: Tensor) -> Tensor:
            return torch.multinomial(rows[nodes], 1).squeeze(1)

        tokens = TOKENS.expand(SAMPLES, -1)
        out = lossless_walk(walk_tree, tokens, sample).output_token_ids.clone()  # [S, 3]
        for level, table in ((1, self.second), (2, self.third)):
            context = tuple(out[:, i] for i in range(level))
            fresh = torch.multinomial(table[context], 1).squeeze(1)
            out[:, level] = torch.where(out[:, level] < 0, fresh, out[:, level])
        return out


def static_batch(batch: int) -> TreeBatch:
    return TreeBatch.from_static(
        TreeTensors.from_tree(TREE), torch.full((batch,), TREE.num_nodes, dtype=torch.int64)
    )


def histogram(tokens: Tensor) -> Tensor:
    places = VOCAB ** torch.arange(tokens.shape[1])
    return torch.bincount((tokens * places).sum(1), minlength=VOCAB ** tokens.shape[1])


def test_marginal_and_joint_distributions_equal_the_target_s():
    target = Target()
    torch.manual_seed(1)
    out = target.emit(static_batch(SAMPLES))
    joint = target.joint()
    assert excess(histogram(out[:, :1]), target.first) < LIMIT
    # In histogram() the first token varies fastest, so the tables are transposed to match.
    assert excess(histogram(out[:, :2]), joint.sum(2).T) < LIMIT
    assert excess(histogram(out), joint.permute(2, 1, 0)) < LIMIT


def test_control_a_wrong_parent_is_detected():
    """Node 6 (token 3 under node 2) accepted as a child of node 3, node 7 as one of node 2."""
    target = Target()
    torch.manual_seed(1)
    tree = static_batch(SAMPLES)
    parents = tree.parents.clone()
    parents[:, 4], parents[:, 6] = 2, 1  # both have token 3, under the wrong sibling
    out = target.emit(dataclasses.replace(tree, parents=parents))
    assert excess(histogram(out), target.joint().permute(2, 1, 0)) > 2 * LIMIT


def test_control_unchecked_drafts_are_detected():
    """Accepting the first draft unless the sample is another child: its probability is too high."""
    target = Target()
    torch.manual_seed(1)
    out = target.emit(static_batch(SAMPLES))
    biased = torch.where((out[:, 0] == 0) & (torch.rand(SAMPLES) < 0.1), 2, out[:, 0])
    assert excess(histogram(biased.unsqueeze(1)), target.first) > 2 * LIMIT


@settings(max_examples=100)
@given(case=cases, seed=st.integers(0, 2**31), early_exit=st.booleans())
def test_the_path_follows_the_samples(case, seed, early_exit):
    """Any samples, different at every visit: the walk is the plain loop, also with early exit."""
    torch.manual_seed(seed)
    levels = case.tree.max_depth + 1
    samples = torch.randint(0, case.vocab_size, (levels, case.batch_size))
    calls = []

    def sample(level, nodes, active):
        calls.append(active.clone())
        return torch.where(active, samples[level], 0)  # may match, but must be ignored

    verdict = lossless_walk(case.tree, case.token_ids, sample, early_exit)
    for b in range(case.batch_size):
        drawn = iter(samples[:, b].tolist())
        nodes, emitted = case.walk(b, lambda node, drawn=drawn: next(drawn))
        assert verdict.path.nodes[b].tolist() == padded(nodes, levels, nodes[-1])
        assert verdict.output_token_ids[b].tolist() == padded(emitted, levels, -1)
        assert int(verdict.path.num_accepted[b]) == len(nodes) - 1
        assert int(verdict.path.last_node[b]) == nodes[-1]
        assert sum(int(active[b]) for active in calls) == len(emitted)  # one draw per token
    if early_exit:
        assert all(bool(active.any()) for active in calls)
    else:
        assert len(calls) == levels


@pytest.mark.parametrize("early_exit", [False, True])
def test_without_drafts_it_is_plain_decoding(early_exit):
    tree = TreeBatch.from_static(TreeTensors.from_tree(TREE), torch.tensor([1, 1]))
    verdict = lossless_walk(
        tree, TOKENS.expand(2, -1), lambda *_: torch.tensor([2, 1]), early_exit=early_exit
    )
    assert verdict.output_token_ids.tolist() == [[2, -1, -1], [1, -1, -1]]
