"""What recipes take from the options, and lambda_0 over the steps."""

import math

import pytest

from vllm_medusa.training.optimisation import Optimisation
from vllm_medusa.training.options import (
    JointOptions,
    LoraSettings,
    MachineOptions,
    QualityBounds,
    StepOptions,
)
from vllm_medusa.training.recipe import HeadsWeight, JointRecipe, Recipe, usual_batch, usual_rate


def test_sine_and_linear_grow_to_the_peak():
    sine, linear = HeadsWeight(0.2, "sine"), HeadsWeight(0.2, "linear")
    assert [linear.at(step, 4) for step in range(4)] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert [sine.at(step, 4) for step in range(4)] == pytest.approx(
        [0.2 * math.sin(math.pi / 8 * n) for n in (1, 2, 3, 4)]
    )
    assert HeadsWeight(0.2, "constant").at(0, 4) == 0.2


@pytest.mark.parametrize("growth", ["sine", "linear"])
def test_a_share_of_the_steps_then_the_peak(growth):
    weight = HeadsWeight(0.3, growth, share=0.5)
    values = [weight.at(step, 10) for step in range(10)]
    assert values == sorted(values) and 0 < values[0] < values[3] < 0.3
    assert values[4:] == pytest.approx([0.3] * 6)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (JointOptions, {"heads_weight": -0.1}),
        (JointOptions, {"heads_weight": math.nan}),
        (JointOptions, {"growth": "cosine"}),
        (JointOptions, {"growth_share": 0.0}),
        (JointOptions, {"growth_share": 1.1}),
        (JointOptions, {"lm_loss": "mse"}),
        (MachineOptions, {"device": "zz"}),
        (MachineOptions, {"device": "cuda:x"}),
        (LoraSettings, {"rank": 0}),
        (LoraSettings, {"alpha": 0.0}),
        (LoraSettings, {"alpha": math.nan}),
        (LoraSettings, {"dropout": 1.0}),
        (QualityBounds, {"max_kl": -1.0}),
        (QualityBounds, {"max_kl": math.nan}),
        (QualityBounds, {"max_perplexity_ratio": 0.9}),
    ],
)
def test_a_value_out_of_bounds_is_named_and_the_bounds_too(kind, bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"{name}.* {value!r}; use "):
        kind(**bad)


@pytest.mark.parametrize("growth", ["sine", "linear", "constant"])
def test_one_step_has_the_peak(growth):
    assert HeadsWeight(0.2, growth).at(0, 1) == pytest.approx(0.2)


def test_what_isnt_given_follows_from_the_width_and_the_rows():
    rates = [usual_rate(width) for width in (64, 256, 512, 4096)]
    assert rates == [5e-3, 5e-3, 1.25e-3, 1e-3]
    rows = (10, 600_000, 3_000_000, 60_000_000)
    assert [usual_batch(count) for count in rows] == [256, 384, 1920, 4096]


def test_the_recipes_defaults_are_the_options():
    steps, joint = StepOptions(), JointOptions()
    given = Recipe(optimisation=Optimisation(5e-3), batch_rows=256)
    assert Recipe.of(steps, bf16=False, hidden_size=64, num_labels=10) == given
    assert JointRecipe.of(joint, steps, bf16=False, self_distilled=True) == JointRecipe()
    other = JointRecipe.of(joint, steps, bf16=False, self_distilled=False)
    assert (other.lm_loss, other.heads_weight.peak) == ("cross-entropy", 0.2)


def test_no_warm_up_is_none_and_not_the_usual_one():
    steps = StepOptions(warmup_steps=0)
    alone = Recipe.of(steps, bf16=False, hidden_size=64, num_labels=10)
    joint = JointRecipe.of(JointOptions(), steps, bf16=False, self_distilled=True)
    assert alone.optimisation.warmup_steps == joint.optimisation.warmup_steps == 0
