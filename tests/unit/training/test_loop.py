"""The schedule, the groups of parameters and the clipping."""

import itertools
import math

import pytest
import torch
from torch import nn

from vllm_medusa.training.loop import clip_gradients, make_optimizer, rate_at
from vllm_medusa.training.options import StepOptions


def test_linear_up_and_a_cosine_down():
    rates = [rate_at(step, 100, 10) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3
    assert rate_at(0, 5, 50) == 1.0  # a short run: warm-up is cut to a tenth
    assert rate_at(0, 100, 0) == 1.0


def test_groups_have_their_own_factor_and_vectors_no_decay():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.bias.requires_grad_(False)
    settings = StepOptions(weight_decay=0.1)
    optimizer = make_optimizer([(first.parameters(), 1.0), (second.parameters(), 0.1)], settings)
    found = [(len(g["params"]), g["factor"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(1, 1.0, 0.1), (1, 1.0, 0.0), (1, 0.1, 0.1)]
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer([([second.bias], 1.0)], settings)


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_clipping_bounds_the_norm_of_all(size):
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, size)
    norm = clip_gradients(parameters, 1.0)
    assert float(norm) == pytest.approx(size * math.sqrt(8))
    after = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters if p.grad is not None))
    assert after == pytest.approx(min(1.0, size * math.sqrt(8)), rel=1e-4)


def test_a_norm_that_is_not_finite_is_only_reported():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([float("inf"), 1.0])
    assert not bool(torch.isfinite(clip_gradients([parameter], 1.0)))
    assert parameter.grad.tolist() == [float("inf"), 1.0]
