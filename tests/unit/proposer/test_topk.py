import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.proposer import topk
from vllm_medusa.proposer.topk import stable_topk


def by_sorting(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@settings(max_examples=60)
@given(data=st.data())
def test_equals_a_stable_sort_for_any_ties(data):
    """Few distinct values, so that most decisions are ties; groups of 4 and of 128."""
    vocab = data.draw(st.integers(1, 90))
    values = st.sampled_from([-float("inf"), -2.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 7.0])
    logits = torch.tensor(data.draw(st.lists(values, min_size=2 * vocab, max_size=2 * vocab))).view(
        2, vocab
    )
    k = data.draw(st.integers(1, vocab))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = logits.to(dtype)
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
