import itertools

import pytest
import torch
import torch.nn.functional as F
from support.random_heads import HIDDEN, VOCAB

from vllm_medusa.heads import MedusaHeads


def randomize(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def naive(heads, hidden, target=None):
    """Head by head, layer by layer, on plain slices of the stacked weights."""
    out = []
    for head in range(heads.num_heads):
        x = hidden
        for block in heads.blocks:
            bias = None if block.bias is None else block.bias[head]
            x = x + F.silu(F.linear(x, block.weight[head], bias))
        if heads.num_lm_heads:
            lm = head % heads.num_lm_heads
            bias = None if heads.lm_head_bias is None else heads.lm_head_bias[lm]
            out.append(F.linear(x, heads.lm_head_weight[lm], bias))
        else:
            scores = F.linear(x, target)
            out.append(scores if heads.token_map is None else scores[:, heads.token_map])
    return torch.stack(out, 1)


@pytest.mark.parametrize(
    ("layers", "bias", "lm_heads", "lm_bias"),
    [
        case
        for case in itertools.product([0, 1, 3], [True, False], [4, 1, 0], [False, True])
        if case[2] or not case[3]
    ],
)
def test_batched_equals_the_naive_loop(layers, bias, lm_heads, lm_bias, hidden, target_lm_head):
    heads = randomize(MedusaHeads(4, layers, HIDDEN, VOCAB, bias, lm_bias, num_lm_heads=lm_heads))
    with torch.no_grad():
        logits = heads.compute_logits(heads(hidden), lambda rows: rows @ target_lm_head.T)
        assert logits.shape == (5, 4, VOCAB)
        expected = naive(heads, hidden, target_lm_head)
        # fp32, values of order 1 to 10: only the order of additions differs
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        for count in (1, 2, 4):
            some = heads.compute_logits(heads(hidden, count), lambda rows: rows @ target_lm_head.T)
            torch.testing.assert_close(some, expected[:, :count], rtol=1e-5, atol=1e-5)


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
    expected = naive(heads, hidden, target_lm_head)
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
