"""Defaults from target and texts; lambda_0 over the steps."""

import math

import pytest

from vllm_medusa.training.options import JointOptions, StepOptions
from vllm_medusa.training.recipe import (
    complete,
    complete_joint,
    heads_weight,
    usual_batch,
    usual_rate,
)


def test_lambda_0_follows_a_sine_to_its_peak():
    joint = JointOptions(heads_weight=0.2)
    assert [heads_weight(joint, step, 4) for step in range(4)] == pytest.approx(
        [0.2 * math.sin(math.pi / 8 * n) for n in (1, 2, 3, 4)]
    )
    assert heads_weight(joint, 0, 1) == pytest.approx(0.2)


def test_defaults_follow_from_width_and_rows():
    rates = [usual_rate(width) for width in (64, 256, 512, 4096)]
    assert rates == [5e-3, 5e-3, 1.25e-3, 1e-3]
    rows = (10, 600_000, 3_000_000, 60_000_000)
    assert [usual_batch(count) for count in rows] == [256, 384, 1920, 4096]


def test_given_values_are_kept_and_others_have_defaults():
    steps, joint = StepOptions(), JointOptions()
    alone = complete(steps, hidden_size=64, num_labels=10)
    assert (alone.batch_tokens, alone.learning_rate, alone.warmup_steps) == (256, 5e-3, 50)
    mine = StepOptions(warmup_steps=0, learning_rate=1.0, batch_tokens=7)
    assert complete(mine, hidden_size=64, num_labels=10) == mine
    for written, lm_loss, peak in ((True, "kl", 0.01), (False, "cross-entropy", 0.2)):
        found, own = complete_joint(joint, steps, self_distilled=written)
        assert (found.lm_loss, found.heads_weight, own.warmup_steps) == (lm_loss, peak, 20)
    assert complete_joint(joint, mine, self_distilled=True)[1].warmup_steps == 0
