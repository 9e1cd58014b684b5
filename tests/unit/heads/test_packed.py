"""Packed heads give the logits of the original heads."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from vllm_medusa.heads import HeadsError, MedusaHeads, PackedHeads

HIDDEN, VOCAB = 16, 40


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> partial[torch.Tensor]:
    return partial(F.linear, weight=weight.clone(), bias=None if bias is None else bias.clone())


def random_heads(num_layers: int, num_lm_heads: int, bias: bool, mapped: bool) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(
        3,
        num_layers,
        HIDDEN,
        VOCAB,
        bias=bias,
        lm_head_bias=bias and num_lm_heads > 0,
        token_map=torch.randperm(VOCAB)[:10] if mapped else None,
        num_lm_heads=num_lm_heads,
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


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
    parts = [PackedHeads(heads, torch_linear, rows) for rows in ranges]
    whole = [deepcopy(heads) for _ in ranges]
    for copy, rows in zip(whole, ranges, strict=True):
        copy.keep_vocabulary(rows)
    for ranks in (parts, whole):
        found = torch.cat([part.compute_logits(part(hidden)) for part in ranks], -1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_refuses_unpacked_heads():
    packed = PackedHeads(random_heads(1, 0, True, False), torch_linear)
    with pytest.raises(HeadsError, match="pass lm_head"):
        packed.compute_logits(packed(torch.zeros(1, HIDDEN)))
    mapped = random_heads(1, 0, True, True)
    with pytest.raises(HeadsError, match="store_lm_head"):
        PackedHeads(mapped, torch_linear)
    with pytest.raises(HeadsError, match=r"\[9, 16\]; these heads score 10 tokens"):
        mapped.store_lm_head(torch.zeros(9, HIDDEN))
