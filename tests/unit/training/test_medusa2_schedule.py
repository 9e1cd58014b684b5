"""lambda_0 over the steps."""

import math

import pytest

from vllm_medusa.training.medusa2_schedule import GROWTHS, HeadsWeight, ScheduleError


def test_sine_and_linear_grow_to_the_peak() -> None:
    sine, linear = HeadsWeight(0.2, "sine"), HeadsWeight(0.2, "linear")
    assert [linear.at(step, 4) for step in range(4)] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert [sine.at(step, 4) for step in range(4)] == pytest.approx(
        [0.2 * math.sin(math.pi / 8 * n) for n in (1, 2, 3, 4)]
    )
    assert HeadsWeight(0.2, "constant").at(0, 4) == 0.2


@pytest.mark.parametrize("growth", ["sine", "linear"])
def test_a_share_of_the_steps_then_the_peak(growth: str) -> None:
    weight = HeadsWeight(0.3, growth, share=0.5)
    values = [weight.at(step, 10) for step in range(10)]
    assert values == sorted(values) and 0 < values[0] < values[3] < 0.3
    assert values[4:] == pytest.approx([0.3] * 6)


@pytest.mark.parametrize(
    "bad",
    [{"peak": -0.1}, {"peak": math.nan}, {"growth": "cosine"}, {"share": 0.0}, {"share": 1.1}],
)
def test_bounds(bad: dict) -> None:
    with pytest.raises(ScheduleError, match="use "):
        HeadsWeight(**bad)


@pytest.mark.parametrize("growth", GROWTHS)
def test_one_step_has_the_peak(growth: str) -> None:
    assert HeadsWeight(0.2, growth).at(0, 1) == pytest.approx(0.2)
