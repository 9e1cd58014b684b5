"""The best tokens in a stable order, of the whole vocabulary or of its shards, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_medusa.proposer import topk
from vllm_medusa.proposer.topk import (
    VocabShard,
    local_topk,
    logit_values,
    merge_topk,
    stable_topk,
    token_ids,
)

NAN, INF = float("nan"), float("inf")
VALUES = [-INF, -2.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 7.0, INF, NAN, -NAN]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_sorting(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@settings(max_examples=60)
@given(data=st.data())
def test_equals_a_stable_sort_for_any_ties(data):
    """Few distinct values, so that most decisions are ties; groups of 4 and of 128."""
    vocab = data.draw(st.integers(1, 90))
    values = st.sampled_from([-INF, -2.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 7.0])
    drawn = data.draw(st.lists(values, min_size=2 * vocab, max_size=2 * vocab))
    k = data.draw(st.integers(1, vocab))
    logits = torch.tensor(drawn).view(2, vocab).to(data.draw(st.sampled_from(DTYPES)))
    expected = by_sorting(logits + 0.0, k)  # -0.0 equals 0.0
    assert torch.equal(stable_topk(logits, k), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "_GROUP", 4)
        patch.setattr(topk, "_DIRECT", 0)
        assert torch.equal(stable_topk(logits, k), expected)


@pytest.mark.parametrize("vocab", [16385, 20000, 32000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_vocabularies_use_groups(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, 3, vocab, generator=generator).to(dtype)
    logits[0, 0, -1] = logits[0, 0].max()  # the last, incomplete group counts
    logits[1, 2] = 0.0  # only ties
    expected = by_sorting(logits, 10)
    assert torch.equal(stable_topk(logits, 10), expected)
    assert stable_topk(logits, 10)[1, 2].tolist() == list(range(10))


def test_more_tokens_than_the_vocabulary():
    with pytest.raises(ValueError, match="k is 5; there are only 4 tokens"):
        stable_topk(torch.zeros(1, 4), 5)


def cut(logits: Tensor, widths: list[int], padding: int) -> list[tuple[Tensor, VocabShard]]:
    """Shards of these widths, whose padding columns would be chosen if they were read."""
    shards, first = [], 0
    for width in widths:
        own = logits[..., first : first + width]
        own = torch.cat([own, own.new_full((*own.shape[:-1], padding), INF)], -1)
        shards.append((own, VocabShard(first, width)))
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
