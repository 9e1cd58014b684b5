"""Compiled rows of the losses against the same functions in plain torch."""

import pytest
import torch
import torch._inductor.config

from vllm_medusa import kernels
from vllm_medusa.training import losses

WIDTH = kernels.FUSED_WIDTH


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, WIDTH, generator=generator).mul(4).bfloat16()
    temperature = torch.rand(rows, 1, generator=generator) + 0.2
    return logits, temperature


def test_compiled_rows_equal_plain_torch():
    as_written = []

    @kernels.fused
    def counted(logits, soft):
        if not torch.compiler.is_compiling():
            as_written.append(len(logits))
        return losses._cross_entropy.__wrapped__(logits, soft)

    for rows in (24, 24, 7, 1):
        logits, temperature = inputs(rows)
        plain = losses._log_sum.__wrapped__(logits, temperature)
        torch.testing.assert_close(losses._log_sum(logits, temperature), plain)
        soft = losses._probabilities.__wrapped__(logits, temperature, plain)
        torch.testing.assert_close(losses._probabilities(logits, temperature, plain), soft)
        wanted = losses._cross_entropy.__wrapped__(logits, soft)
        torch.testing.assert_close(counted(logits, soft), wanted, rtol=1e-2, atol=1e-6)
    assert not as_written
    assert counted(logits[:, :64], soft[:, :64]) and as_written == [1]  # narrow rows


def test_impossible_tokens_and_rows_without_a_label():
    logits = torch.tensor([[1.0, -torch.inf, 2.0], [torch.nan] * 3])
    soft = torch.tensor([[0.3, 0.0, 0.5], [0.0] * 3])
    entropy, _ = losses._cross_entropy(logits, soft)
    expected = -(soft[0, [0, 2]] * logits[0, [0, 2]].log_softmax(-1)).sum()
    torch.testing.assert_close(entropy[:, 0], torch.stack([expected, expected * 0]))


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_runs_as_written_where_compiling_fails(compiler):
    seen = []

    @kernels.fused
    def doubled(rows):
        if not torch.compiler.is_compiling():
            seen.append(len(rows))
        return rows * 2

    changes = {"cpp.cxx": (compiler,), "force_disable_caches": True}
    with torch._inductor.config.patch(changes), pytest.warns(UserWarning, match="times slower"):
        assert doubled(torch.ones(3, WIDTH)).eq(2).all()
    assert doubled(torch.ones(5, WIDTH)).eq(2).all()
    assert seen == [3, 5]
