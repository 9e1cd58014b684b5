"""Ranks as the proposer would draw the guesses, and sums that add up over batches."""

import pytest
import torch

from vllm_medusa.heads import MedusaHeads
from vllm_medusa.proposer.topk import stable_topk
from vllm_medusa.training.accuracy import TOP, Measurement, label_ranks
from vllm_medusa.training.losses import IGNORED

V, H, K = 30, 8, 2


def make_heads(token_map: torch.Tensor | None) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(K, 1, H, V, shared_lm_head=True, token_map=token_map)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("mapped", [False, True])
def test_a_rank_is_the_place_in_the_proposers_list(mapped):
    token_map = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:12]
    heads = make_heads(token_map if mapped else None)
    matrix = torch.randn(V, H).round()  # many equal logits
    states = torch.randn(17, H).round()

    def lm_head(x):
        logits = (x @ matrix.T).round(decimals=0)
        return logits[:, token_map] if mapped else logits

    labels = torch.randint(V, (17, K), generator=torch.Generator().manual_seed(2))
    labels[3, 1] = IGNORED
    ranks = label_ranks(heads, states, labels, lm_head, chunk=5)
    logits = lm_head(heads(states).flatten(0, 1)).unflatten(0, (17, K))
    count = heads.draft_vocab_size
    order = heads.to_target_ids(stable_topk(logits, count))  # [N, K, V_draft]
    for n in range(17):
        for h in range(K):
            at = (order[n, h] == labels[n, h]).nonzero().flatten().tolist()
            assert ranks[n, h] == (at[0] if at else count), (n, h)
    assert int(ranks[3, 1]) == count
    assert bool((ranks[:3] == count).any()) == mapped


def test_batches_add_up():
    ranks = torch.tensor([[0, 2], [1, 0], [0, TOP], [30, 1]])
    labels = torch.tensor([[5, 6], [7, 8], [9, 3], [4, IGNORED]])
    whole, parts = Measurement(K), Measurement(K)
    whole.add(torch.tensor([8.0, 3.0]), torch.tensor([4, 3]), ranks, labels)
    for rows, counts in ((slice(0, 1), [1, 1]), (slice(1, 4), [3, 2])):
        parts.add(torch.tensor([4.0, 1.5]), torch.tensor(counts), ranks[rows], labels[rows])
    found = parts.summary()
    assert found == whole.summary()
    assert found["labels"] == 4 and found["loss"] == [2.0, 1.0]
    assert found["top"][0][:3] == [0.5, 0.75, 0.75]


@pytest.mark.parametrize("count", [4, 12], ids=["below TOP", "above TOP"])
def test_labels_outside_the_draft_vocabulary_are_missed_and_have_no_loss(count):
    """The mean loss is over the labels that have one; top k is over all labels."""
    token_map = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:count]
    heads = make_heads(token_map)
    matrix = torch.randn(V, H)
    states = torch.randn(200, H)
    labels = torch.randint(V, (200, K), generator=torch.Generator().manual_seed(2))
    labels[::3, 1] = IGNORED

    def lm_head(x):
        return (x @ matrix.T)[..., token_map]

    measured = Measurement(K)
    measured.measure(heads, states, labels, lm_head)
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
