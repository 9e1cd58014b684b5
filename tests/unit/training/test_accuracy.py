"""Ranks in the proposer's order, and sums that are additive over batches."""

import pytest
import torch

from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.training.accuracy import TOP, Measurement, token_ranks
from vllm_medusa.training.rows import IGNORED

V, H, K = 30, 8, 2


def make_heads(token_map: torch.Tensor | None) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(K, 1, H, V, num_lm_heads=0, token_map=token_map)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


def test_a_rank_is_the_position_in_the_proposers_list():
    logits = torch.randn(17, K, V, generator=torch.Generator().manual_seed(0)).round()
    assert bool((logits.sort(-1).values.diff(dim=-1) == 0).any()), "many equal logits"
    order = stable_topk(logits, V)  # [N, K, V]
    for rank in range(V):
        assert bool((token_ranks(logits, order[..., rank]) == rank).all())


def test_batches_add_up():
    heads, matrix = make_heads(None), torch.randn(V, H)
    x, labels = torch.randn(300, K, H), torch.randint(V, (300, K))
    labels[7, 1] = IGNORED
    whole, parts = Measurement(K), Measurement(K)
    whole.measure(heads, x, labels, lambda x: x @ matrix.T)
    for rows in (slice(0, 1), slice(1, 200), slice(200, 300)):
        parts.measure(heads, x[rows], labels[rows], lambda x: x @ matrix.T)
    torch.testing.assert_close(whole.sums, parts.sums)
    assert whole.summary()["labels"] == 300


@pytest.mark.parametrize("count", [4, 12], ids=["below TOP", "above TOP"])
def test_labels_outside_the_draft_vocabulary_are_misses_without_loss(count):
    """The mean loss is over labels with a loss; top k is over all labels."""
    token_map = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:count]
    heads = make_heads(token_map)
    matrix = torch.randn(V, H)
    states = torch.randn(200, H)
    labels = torch.randint(V, (200, K), generator=torch.Generator().manual_seed(2))
    labels[::3, 1] = IGNORED

    def lm_head(x):
        return (x @ matrix.T)[..., token_map]

    measured = Measurement(K)
    measured.measure(heads, heads(states), labels, lm_head)
    with torch.no_grad():
        logs = lm_head(heads(states)).log_softmax(-1)  # [N, K, V_draft]
    summary = measured.summary()
    for head in range(K):
        losses, hits, counted = [], 0, 0
        for row in range(200):
            label = int(labels[row, head])
            counted += label != IGNORED
            at = (token_map == label).nonzero().flatten()
            if len(at):
                losses.append(-float(logs[row, head, at]))
                hits += int((logs[row, head] > logs[row, head, at]).sum()) < TOP
        assert 0 < len(losses) < counted
        assert summary["loss"][head] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert summary["top"][head][TOP - 1] == pytest.approx(hits / counted, abs=1e-4)
