"""Shards of the vocabulary against the whole, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_medusa.proposer import propose, stable_topk
from vllm_medusa.proposer.sharded import (
    VocabShard,
    local_topk,
    logit_values,
    merge_topk,
    propose_sharded,
    token_ids,
)
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors

NAN, INF = float("nan"), float("inf")
VALUES = [-INF, -2.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 7.0, INF, NAN, -NAN]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def cut(logits: Tensor, widths: list[int], padding: int) -> list[tuple[Tensor, VocabShard]]:
    """Shards of these widths, whose padding columns would be chosen if they were read."""
    shards, first, vocab = [], 0, sum(widths)
    for width in widths:
        own = logits[..., first : first + width]
        own = torch.cat([own, own.new_full((*own.shape[:-1], padding), INF)], -1)
        shards.append((own, VocabShard(first, width, vocab)))
        first += width
    return shards


@st.composite
def heads(draw) -> tuple[Tensor, list[int], int]:
    """Logits [2, 3, V] full of ties, the widths of 1 to 8 shards (some may be 0), and k."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    widths = draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))
    widths[draw(st.integers(0, ranks - 1))] += 1
    vocab = sum(widths)
    values = draw(st.lists(st.sampled_from(VALUES), min_size=6 * vocab, max_size=6 * vocab))
    logits = torch.tensor(values).to(draw(st.sampled_from(DTYPES))).view(2, 3, vocab)
    return logits, widths, draw(st.integers(1, vocab))


@settings(max_examples=200)
@given(case=heads(), padding=st.integers(0, 3))
def test_shards_equal_the_full_vocabulary(case, padding):
    logits, widths, k = case
    expected = stable_topk(logits, k)
    keys = torch.stack([local_topk(own, k, shard) for own, shard in cut(logits, widths, padding)])
    merged = merge_topk(keys, k)
    assert torch.equal(token_ids(merged), expected)
    values = logits.gather(-1, expected).float() + 0.0
    assert torch.equal(logit_values(merged).nan_to_num(9e9), values.nan_to_num(9e9))
    assert torch.equal(merge_topk(keys.flip(0), k), merged)  # independent of the order of ranks


@pytest.mark.parametrize("mapped", [False, True])
def test_every_rank_proposes_what_a_single_rank_would(mapped):
    tree = TreeTensors.from_tree(TokenTree.dense([4, 3, 2]))
    logits = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    token_map = torch.arange(50).flip(0) * 3 if mapped else None
    shards = cut(logits, [20, 3, 27], 2)
    sent = torch.stack([local_topk(own[:, :3], 4, shard) for own, shard in shards])
    for rank, (own, shard) in enumerate(shards):

        def all_gather(keys, rank=rank):
            assert torch.equal(keys, sent[rank])
            return sent

        proposal = propose_sharded(own, tree, shard, all_gather, token_map)
        assert torch.equal(proposal, propose(logits, tree, token_map))


def test_trees_that_do_not_fit():
    tree = TreeTensors.from_tree(TokenTree.dense([4, 3]))
    with pytest.raises(ValueError, match="depth 2, for 1 heads"):
        propose_sharded(torch.zeros(1, 1, 9), tree, VocabShard(0, 9, 18), torch.stack)
    with pytest.raises(ValueError, match="best 4 tokens of a head; the heads score 3"):
        propose_sharded(torch.zeros(1, 2, 2), tree, VocabShard(0, 2, 3), torch.stack)
