"""Step costs: found from noisy steps, followed as the machine changes, kept on disk."""

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.store import cost_path, load_cost, save_cost


def curve(rows: float, requests: int, drafted: bool) -> float:
    """Rows from 16 on are dear, multiples of 4 too; heads and trees add something."""
    base = 20.0 * (1 + 0.01 * rows + 0.03 * max(0.0, rows - 16)) * (1.1 if rows % 4 == 0 else 1.0)
    return base + drafted * (1.0 + 0.1 * requests) + (rows > requests) * 2.0


def logarithms(cost: StepCost, steps: list[tuple[int, int, float]]) -> np.ndarray:
    """Of the times of some steps, as the features have them."""
    features = cost.features(steps)
    return (features.weights * cost._mean[features.places]).sum(1)


def learned(steps: int = 400, noise: float = 0.05, seed: int = 0, factor: float = 1.0) -> StepCost:
    cost = StepCost(64)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        requests = int(rng.choice([1, 2, 4, 8]))
        drafted = bool(rng.integers(2))
        rows = requests * int(rng.integers(1, 5)) if drafted else requests
        ms = factor * curve(rows, requests, drafted) * np.exp(rng.normal(0, noise))
        cost.observe(rows, requests, drafted, ms)
    return cost


def test_what_was_seen_is_found_again():
    cost = learned(1000)
    for requests in (1, 2, 4, 8):
        for rows, drafted in ((requests, False), (2 * requests, True), (4 * requests, True)):
            expected = curve(rows, requests, drafted)
            assert float(cost.ms(rows, requests, drafted)) == pytest.approx(expected, rel=0.1)


def test_a_count_may_be_cheaper_than_the_one_below():
    cost = StepCost(16)
    for _ in range(50):
        for rows in (3, 4, 5):
            cost.observe(rows, 1, True, curve(rows, 1, True))
    low, high = float(cost.ms(5, 1, True)), float(cost.ms(4, 1, True))
    assert low < high and low == pytest.approx(curve(5, 1, True), rel=0.02)


def test_between_and_beyond_what_was_seen():
    cost = StepCost(64)
    for rows, ms in ((1, 10.0), (32, 20.0)) * 40:
        cost.observe(rows, rows, False, ms)
    between = cost.ms(np.arange(1, 33), 1, False)
    assert (np.diff(between) > -0.2).all() and 10 < between[15] < 20
    assert float(cost.ms(64, 64, False)) > 20.0
    assert float(cost.ms(640, 640, False)) == pytest.approx(10 * float(cost.ms(64, 64, False)))


def test_vectors_are_the_single_values():
    cost = learned(50)
    rows = np.arange(4, 64)
    for drafted in (False, True):
        many = cost.ms(rows, 4, drafted)
        assert many.shape == rows.shape
        assert many == pytest.approx([float(cost.ms(int(r), 4, drafted)) for r in rows])
        means = logarithms(cost, [(int(r), 4, float(drafted)) for r in rows])
        assert np.exp(means) == pytest.approx(many)


def test_the_machine_slows_down_and_all_row_counts_follow():
    cost = learned()
    before = cost.ms(np.array([1, 4, 32]), 1, False)
    for _ in range(12):
        cost.observe(8, 8, False, 2 * curve(8, 8, False))
    assert cost.surprises >= 1
    assert cost.ms(np.array([1, 4, 32]), 1, False) == pytest.approx(2 * before, rel=0.12)


@pytest.mark.parametrize("times", [0.1, 10.0, 1000.0])
def test_one_outlier_does_not_matter(times):
    cost = learned()
    rows = np.array([1, 2, 4, 8, 16, 32])
    before = cost.ms(rows, 1, False)
    cost.observe(8, 8, False, times * curve(8, 8, False))
    assert cost.ms(rows, 1, False) == pytest.approx(before, rel=0.15)
    ratios = cost.ms(rows, 1, False) / before
    assert ratios.max() / ratios.min() < 1.03  # what choices follow from


@pytest.mark.parametrize("factor", [3.0, 1 / 3.0])
def test_a_wrong_table_is_unlearned(factor):
    """Trees are three times as dear or cheap as the table says: within a dozen tries it's known."""
    table = StepCost(64)
    for _ in range(100):
        for rows, drafted in ((1, False), (1, True), (2, True), (4, True), (8, True)):
            table.observe(rows, 1, drafted, curve(rows, 1, drafted) * (factor if rows > 1 else 1.0))
    cost = StepCost.from_dict(json.loads(json.dumps(table.to_dict())))
    assert float(cost.ms(4, 1, True)) == pytest.approx(factor * curve(4, 1, True), rel=0.05)
    for _ in range(12):
        for _ in range(5):
            cost.observe(1, 1, False, curve(1, 1, False))
        cost.observe(4, 1, True, curve(4, 1, True))
    assert float(cost.ms(4, 1, True)) == pytest.approx(curve(4, 1, True), rel=0.1)
    assert float(cost.ms(1, 1, False)) == pytest.approx(curve(1, 1, False), rel=0.1)


def test_what_is_not_seen_gets_doubtful_and_no_more_than_at_first():
    cost = learned()
    plain, tree = cost.features([(1, 1, False)]), cost.features([(4, 1, True)])
    first = StepCost(64).doubt(tree, plain)
    doubts = [cost.doubt(tree, plain)]
    for _ in range(3):
        for _ in range(700):
            cost.observe(1, 1, False, 50.0)
        doubts.append(cost.doubt(tree, plain))
    assert doubts[0] < 0.3 * first and doubts[0] < doubts[1] and max(doubts) <= first


def test_nonsense_teaches_nothing():
    cost = learned(20)
    before = cost.to_dict()
    for rows, requests, ms in (
        (1, 1, 0.0),
        (1, 1, -1.0),
        (1, 1, float("nan")),
        (1, 1, float("inf")),
        (0, 0, 5.0),
        (2, 3, 5.0),
    ):
        cost.observe(rows, requests, False, ms)
    assert cost.to_dict() == before


def test_equal_steps_give_equal_costs():
    assert learned(100).to_dict() == learned(100).to_dict()


def test_estimates_stay_sound_for_long():
    cost = StepCost(16)
    rng = np.random.default_rng(3)
    for _ in range(4000):
        rows = int(rng.integers(1, 17))
        cost.observe(rows, 1, rows > 1, 10.0 * float(np.exp(rng.normal(0, 0.3))))
    assert np.linalg.eigvalsh(cost._covariance).min() > -1e-9
    assert (cost._covariance == cost._covariance.T).all()
    assert float(cost.ms(8, 1, True)) == pytest.approx(10.0, rel=0.3)


OF = {"model": "m", "device": "d", "dtype": "bfloat16"}


def test_costs_come_back_from_the_disk(tmp_path):
    cost, path = learned(), cost_path(tmp_path / "cache", OF)
    assert save_cost(path, OF, cost) == ""
    back, reason = load_cost(path, OF, 64)
    assert reason == "" and back.steps == cost.steps
    rows = np.arange(1, 65)
    assert back.ms(rows, 1, True) == pytest.approx(cost.ms(rows, 1, True), rel=1e-4)
    assert cost_path(tmp_path, OF | {"dtype": "float16"}) != cost_path(tmp_path, OF)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:50], "is not JSON"),
        (lambda text: "[]", "not a JSON object"),
        (lambda text: text.replace('"format": 2', '"format": 1'), "of something else"),
        (lambda text: text.replace("bfloat16", "float16"), "of something else"),
        (lambda text: text.replace('"max_rows": 64', '"max_rows": 32'), "no step costs"),
        (lambda text: text.replace('"max_rows": 64', '"max_rows": 63'), "no step costs|sizes"),
        (lambda text: text.replace('"steps"', '"stops"'), "no step costs"),
        (lambda text: text.replace('"log_ms": [', '"log_ms": [NaN, '), "no step costs"),
        (lambda text: text.replace('"noise": ', '"noise": -'), "no step costs"),
    ],
)
def test_bad_files_are_ignored_with_a_reason(tmp_path, change, says):
    path = cost_path(tmp_path, OF)
    save_cost(path, OF, learned(20))
    path.write_text(change(path.read_text()))
    cost, reason = load_cost(path, OF, 64)
    assert cost.steps == 0 and any(part in reason for part in says.split("|")), reason


def test_no_file_is_no_reason_and_no_folder_is_one(tmp_path):
    cost, reason = load_cost(tmp_path / "none.json", OF, 64)
    assert (cost.steps, reason) == (0, "")
    (tmp_path / "file").touch()
    assert "can't be written" in save_cost(tmp_path / "file" / "a.json", OF, learned(5))


def test_a_folder_that_may_not_be_read_is_no_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    cost, reason = load_cost(tmp_path / "kept.json", OF, 64)
    assert cost.steps == 0 and "Permission denied" in reason


def test_heads_take_the_same_time_beside_few_rows_and_many():
    """So what plain steps take follows from steps with heads, however long those were."""
    cost = StepCost(64)
    for _ in range(200):
        for rows, heads in ((20, 1.0), (20, 0.0), (4, 1.0)):
            cost.observe(rows, 4, heads, 10.0 + rows + 5.0 * heads)
    assert float(cost.ms(4, 4, 0.0)) == pytest.approx(14.0, rel=0.05)  # 16.3 by shares
    many = cost.ms(np.array([4, 20]), 4, np.array([1.0, 1.0]))
    one_by_one = [float(cost.ms(rows, 4, 1.0)) for rows in (4, 20)]
    assert many == pytest.approx(one_by_one)
    means = logarithms(cost, [(4, 4, 1.0), (20, 4, 1.0)])
    assert np.exp(means) == pytest.approx(one_by_one)
