"""Compiled rows of the losses against the same functions in plain torch."""

import pytest
import torch

from vllm_medusa import kernels
from vllm_medusa.training import losses

WIDTH = kernels.FUSED_WIDTH


def inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, WIDTH, generator=generator).mul(4).bfloat16()
    temperature = torch.rand(rows, 1, generator=generator) + 0.2
    return logits, temperature


def test_compiled_rows_equal_plain_torch():
    for rows in (24, 24, 7, 1):
        logits, temperature = inputs(rows)
        plain = losses._log_sum.__wrapped__(logits, temperature)
        torch.testing.assert_close(losses._log_sum(logits, temperature), plain)
        soft = losses._probabilities.__wrapped__(logits, temperature, plain)
        torch.testing.assert_close(losses._probabilities(logits, temperature, plain), soft)
        got, wanted = (
            function(logits, soft)
            for function in (losses._cross_entropy, losses._cross_entropy.__wrapped__)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-6)


def test_runs_as_written_without_a_compiler(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch._inductor.config.cpp, "cxx", ("/no/such/compiler",))
        patch.setattr(torch._inductor.config, "force_disable_caches", True)
        doubled = kernels.fused(lambda rows: rows * 2)
        with pytest.raises(Exception, match="compiler"):
            torch.compile(lambda rows: rows * 2)(torch.ones(3, WIDTH))
        assert doubled(torch.ones(3, WIDTH)).eq(2).all()
    assert doubled(torch.ones(3, WIDTH)).eq(2).all()
