"""Heads, and packed heads, which give the same logits."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.random_heads import HIDDEN, VOCAB

from vllm_medusa.heads.cpu import PackedHeads
from vllm_medusa.heads.model import MedusaHeads


def randomize(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_untrained_heads_give_the_lm_heads_logits(layers, hidden, target_lm_head):
    expected = F.linear(hidden, target_lm_head).unsqueeze(1).expand(-1, 3, -1)
    own = MedusaHeads(3, layers, HIDDEN, VOCAB)
    own.init_lm_heads(target_lm_head)
    torch.testing.assert_close(own.compute_logits(own(hidden)), expected, rtol=1e-5, atol=1e-5)
    shared = MedusaHeads(3, layers, HIDDEN, VOCAB, num_lm_heads=0)
    shared.store_lm_head(target_lm_head)
    torch.testing.assert_close(shared.compute_logits(shared(hidden)), expected)


def test_a_truncated_vocabulary_scores_its_own_tokens_only(hidden, target_lm_head):
    token_map = torch.tensor([3, 17, 5])
    heads = randomize(MedusaHeads(2, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=token_map))
    whole = MedusaHeads(2, 1, HIDDEN, VOCAB, num_lm_heads=0)
    whole.load_state_dict(heads.state_dict(), strict=False)
    expected = whole.compute_logits(whole(hidden), lambda rows: rows @ target_lm_head.T)
    expected = expected[..., token_map]
    padded = torch.cat([target_lm_head, torch.full((4, HIDDEN), 9.0)])
    through_callable = heads.compute_logits(heads(hidden), lambda rows: rows @ padded.T)
    torch.testing.assert_close(through_callable, expected, rtol=1e-5, atol=1e-5)
    heads.store_lm_head(padded[token_map])
    torch.testing.assert_close(heads.compute_logits(heads(hidden)), expected, rtol=1e-5, atol=1e-5)
    own = MedusaHeads(2, 1, HIDDEN, VOCAB, token_map=token_map, lm_head_bias=True)
    own.init_lm_heads(padded, torch.arange(24.0))
    assert torch.equal(own.lm_head_weight[1], target_lm_head[token_map])
    assert own.lm_head_bias[0].tolist() == [3, 17, 5]


def test_every_head_is_trained_independently(hidden):
    heads = randomize(MedusaHeads(3, 2, HIDDEN, VOCAB))
    heads.compute_logits(heads(hidden))[:, 1].sum().backward()
    for parameter in heads.parameters():
        assert parameter.grad[1].abs().sum() > 0
        assert parameter.grad[[0, 2]].abs().sum() == 0


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> partial[torch.Tensor]:
    return partial(F.linear, weight=weight.clone(), bias=None if bias is None else bias.clone())


def random_heads(num_layers: int, num_lm_heads: int, bias: bool, mapped: bool) -> MedusaHeads:
    has_bias = bias and num_lm_heads > 0
    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:10]
    token_map = some if mapped else None
    sizes = 3, num_layers, HIDDEN, VOCAB, bias, has_bias, token_map
    return randomize(MedusaHeads(*sizes, num_lm_heads=num_lm_heads))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_lm_heads", [0, 1, 3])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_equals_the_heads(num_layers, num_lm_heads, bias, mapped):
    heads = random_heads(num_layers, num_lm_heads, bias, mapped)
    target = torch.randn(VOCAB + 3, HIDDEN)  # three padding rows
    hidden = torch.randn(5, HIDDEN)

    wanted = heads.compute_logits(heads(hidden), lambda rows: rows @ target.T)
    if mapped and num_lm_heads == 0:
        heads.store_lm_head(target[heads.token_map])
    packed = PackedHeads(heads, torch_linear)
    with torch.no_grad():
        for parameter in heads.parameters():  # packed weights are copies: no effect
            parameter.fill_(float("nan"))
    found = packed.compute_logits(packed(hidden, 3), lambda rows: rows @ target.T)

    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    first = packed.compute_logits(packed(hidden, 2), lambda rows: rows @ target.T)
    torch.testing.assert_close(first, wanted[:, :2], atol=1e-5, rtol=1e-5)
    rest = packed.compute_logits(packed(hidden, 3, first=2), lambda rows: rows @ target.T, first=2)
    torch.testing.assert_close(rest, wanted[:, 2:], atol=1e-5, rtol=1e-5)
    assert (packed.token_map is None) == (not mapped)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("num_lm_heads", [1, 3])
def test_rows_of_stored_lm_heads(num_lm_heads, mapped):
    heads = random_heads(1, num_lm_heads, True, mapped)
    hidden = torch.randn(5, HIDDEN)
    wanted = heads.compute_logits(heads(hidden))
    ranges = slice(0, 7), slice(7, None)
    whole = [deepcopy(heads) for _ in ranges]
    for copy, rows in zip(whole, ranges, strict=True):
        copy.keep_vocabulary(rows)
    parts = [PackedHeads(each, torch_linear) for each in whole]
    for ranks in (parts, whole):
        found = torch.cat([part.compute_logits(part(hidden)) for part in ranks], -1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
