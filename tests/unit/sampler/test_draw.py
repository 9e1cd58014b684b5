"""Sampling and truncation: the right distribution, and exactly vLLM's tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa import noise
from vllm_medusa.sampler import draw_exponential, draw_splitmix, truncate_logits


@pytest.mark.parametrize("draw", [draw_exponential, draw_splitmix])
def test_draws_follow_the_softmax(draw):
    logits = torch.tensor([0.5, -1.0, -torch.inf, 2.0, 0.0])
    generator = torch.Generator().manual_seed(3)
    samples = 3_000
    counts = torch.bincount(
        torch.stack([draw(logits, generator) for _ in range(samples)]), minlength=5
    )
    probs = logits.softmax(-1)
    deviation = (counts / samples - probs).abs()
    assert counts[2] == 0
    assert (deviation < 5 * (probs * (1 - probs) / samples).sqrt() + 1e-9).all()


@pytest.mark.parametrize("draw", [draw_exponential, draw_splitmix])
def test_a_draw_advances_the_generator_independently_of_logits(draw):
    one, two = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draw(torch.randn(64), one)
    draw(torch.full((64,), -torch.inf).index_fill(0, torch.tensor([3]), 0.0), two)
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=two))


def test_splitmix_known_bits():
    """SplitMix64 from seed 1234567 starts 6457827717110365317, 3203168211198807973 (published)."""
    words = torch.tensor([1234567]) + torch.arange(1, 3) * noise._signed(noise._GAMMA)
    assert noise._mix(words).tolist() == [6457827717110365317, 3203168211198807973]


@settings(max_examples=200)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    top_k=st.integers(-1, 14),
    top_p=st.floats(0.05, 1.0),
)
def test_truncation_by_hand(logits, top_k, top_p):
    row = torch.tensor([logits], dtype=torch.float32) / 2
    kept = truncate_logits(row, top_k, top_p)[0].isfinite()
    alive = torch.ones(len(logits), dtype=torch.bool)
    if 0 < top_k < len(logits):
        alive = row[0] >= sorted(row[0].tolist())[-top_k]
    if top_p < 1:
        probs = row[0].masked_fill(~alive, -torch.inf).softmax(-1).double()
        mass = float(probs[kept].sum())
        assert mass > top_p - 1e-5  # enough is kept ...
        smallest = float(probs[kept].min())
        assert mass - smallest <= top_p + 1e-5  # ... and nothing that could be removed
        assert float(probs[~kept].max() if (~kept).any() else 0) <= smallest  # the tail is removed
        assert not (kept & ~alive).any()
    else:
        assert torch.equal(kept, alive)
    assert bool(kept.any())


def test_the_smallest_top_p_leaves_one_token():
    """In float32 1 - p is then 1, which the sum of all probabilities does not exceed."""
    row = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    kept = truncate_logits(row, top_p=1e-9).isfinite()
    assert kept.tolist() == [[False, True, False, False]]
