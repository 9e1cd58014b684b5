"""Step costs: estimated from noisy steps, tracking changes of the machine, stored on disk."""

import numpy as np
import pytest

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.store import CostStore


def curve(rows: float, requests: int, limit: int) -> float:
    """Rows beyond 16 cost more; heads (in proportion to their limit) and trees add to it."""
    base = 20.0 * (1 + 0.01 * rows + 0.03 * max(0.0, rows - 16))
    return base + limit * (1.0 + 0.1 * requests) + (rows > requests) * 2.0


def learned(steps: int = 400) -> StepCost:
    cost, rng = StepCost(64), np.random.default_rng(0)
    for _ in range(steps):
        requests = int(rng.choice([1, 2, 4, 8]))
        limit = int(rng.integers(2))
        rows = requests * int(rng.integers(1, 5)) if limit else requests
        ms = curve(rows, requests, limit) * float(np.exp(rng.normal(0, 0.05)))
        cost.observe(rows, requests, limit, ms)
    return cost


def test_observed_costs_are_reproduced():
    cost = learned(1000)
    for requests in (1, 2, 4, 8):
        for rows, limit in ((requests, 0), (2 * requests, 1), (4 * requests, 1)):
            expected = curve(rows, requests, limit)
            assert float(cost.ms(rows, requests, limit)) == pytest.approx(expected, rel=0.06)
        plain = float(cost.ms(requests, requests, 0))
        assert cost.plain_ms(requests) == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.2])
def test_the_time_of_drafting_is_learned_for_each_limit(power):
    """From steps that verify other numbers of nodes; in between it is interpolated."""

    def true(nodes: int, limit: int) -> float:
        return 20.0 + nodes + (limit > 0) * 1.0 * limit**power

    cost, rng = StepCost(64), np.random.default_rng(0)
    for _ in range(600):
        limit = int(rng.choice([0, 1, 2, 4, 8, 16]))
        nodes = int(rng.choice([0, 1, 2, 4, 8]))
        noise = float(np.exp(rng.normal(0, 0.02)))
        cost.observe(1 + nodes, 1, limit, true(nodes, limit) * noise)
    for limit in (1, 2, 3, 4, 6, 8, 12, 16):
        found = float(cost.ms(5, 1, limit) - cost.ms(5, 1, 0))
        assert found == pytest.approx(true(4, limit) - true(4, 0), rel=0.25, abs=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_drafting_that_took_no_time_is_learned_again(seed):
    """Its time is not taken for that of plain steps, of which there are few."""
    cost, rng = StepCost(64), np.random.default_rng(seed)
    for drafting in (0.05, 2.0):
        for step in range(1000):
            limit = 4 * (step % 10 > 0)
            ms = 10.0 + (limit > 0) * drafting
            cost.observe(1, 1, limit, ms * float(np.exp(rng.normal(0, 0.05))))
    plain, ms = float(cost.ms(1, 1, 0)), float(cost.ms(1, 1, 4))
    assert plain == pytest.approx(10.0, rel=0.08)
    assert 1.2 < ms - plain < 2.5


def test_interpolation_and_extrapolation():
    cost = StepCost(64)
    for rows, ms in ((1, 10.0), (32, 20.0)) * 40:
        cost.observe(rows, rows, 0, ms)
    between = cost.ms(np.arange(1, 33), 64, 0)
    assert (np.diff(between) > 0).all() and 10 < between[15] < 20
    assert float(cost.ms(64, 64, 0)) > 20.0
    assert float(cost.ms(640, 640, 0)) == pytest.approx(10 * float(cost.ms(64, 64, 0)))


def test_vectors_equal_single_values():
    cost, rows = learned(50), np.arange(4, 64)
    for limit in (0, 3):
        single = [float(cost.ms(int(n), 4, limit)) for n in rows]
        assert cost.ms(rows, 4, np.full(len(rows), limit)) == pytest.approx(single)


def test_the_machine_slows_down_and_all_row_counts_follow():
    """In small steps, tracked from step to step."""
    cost = learned()
    before = cost.ms(np.array([1, 4, 16]), 1, 0)
    for step in range(200):
        cost.observe(8, 8, 0, (1 + min(step, 100) / 100) * curve(8, 8, 0))
    assert float(cost.ms(8, 8, 0)) == pytest.approx(2 * curve(8, 8, 0), rel=0.05)
    assert (cost.ms(np.array([1, 4, 16]), 1, 0) > 1.3 * before).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_sudden_change_is_adopted_after_a_few_steps(rows):
    """A change of steps with drafts is not mistaken for one of plain steps."""
    cost = StepCost(64)
    for _ in range(100):
        cost.observe(1, 1, 0, 20.0)
        cost.observe(5, 1, 1, 25.0)
    for _ in range(8):
        cost.observe(rows, 1, int(rows > 1), 100.0)
    assert cost.surprises == 1
    assert float(cost.ms(rows, 1, int(rows > 1))) == pytest.approx(100.0, rel=0.1)
    for _ in range(3):
        cost.observe(1, 1, 0, 20.0 if rows > 1 else 100.0)
    assert cost.plain_ms(1) == pytest.approx(20.0 if rows > 1 else 100.0, rel=0.15)


@pytest.mark.parametrize(("rows", "requests", "limit"), [(1, 1, 0), (5, 1, 4), (300, 16, 4)])
def test_four_steps_show_a_sudden_change(rows, requests, limit):
    """Also if it is divided among several knots."""
    cost = StepCost(1024)
    for _ in range(300):
        cost.observe(rows, requests, limit, 10.0)
    for _ in range(4):
        cost.observe(rows, requests, limit, 30.0)
    assert cost.surprises == 1
    assert float(cost.ms(rows, requests, limit)) == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize("times", [0.1, 10.0, 1000.0])
def test_one_outlier_does_not_matter(times):
    cost, rows = learned(), np.array([1, 2, 4, 8, 16, 32])
    before = cost.ms(rows, 1, 0)
    cost.observe(8, 8, 0, times * curve(8, 8, 0))
    assert cost.ms(rows, 1, 0) == pytest.approx(before, rel=0.06)


@pytest.mark.parametrize("factor", [3.0, 1 / 3.0])
def test_a_wrong_table_is_corrected(factor):
    """Trees are three times as expensive or cheap as in the table."""
    table = StepCost(64)
    for _ in range(100):
        for rows, limit in ((1, 0), (1, 1), (2, 1), (4, 1), (8, 1)):
            table.observe(rows, 1, limit, curve(rows, 1, limit) * (factor if rows > 1 else 1.0))
    cost = StepCost.from_dict(table.to_dict())
    assert float(cost.ms(4, 1, 1)) == pytest.approx(factor * curve(4, 1, 1), rel=0.05)
    for _ in range(12):
        for _ in range(5):
            cost.observe(1, 1, 0, curve(1, 1, 0))
        cost.observe(4, 1, 1, curve(4, 1, 1))
    assert float(cost.ms(4, 1, 1)) == pytest.approx(curve(4, 1, 1), rel=0.1)
    assert cost.plain_ms(1) == pytest.approx(curve(1, 1, 0), rel=0.1)


@pytest.mark.parametrize(
    ("rows", "requests", "ms"),
    [(1, 1, 0), (1, 1, -1.0), (1, 1, float("nan")), (1, 1, float("inf")), (0, 0, 5), (2, 3, 5)],
)
def test_invalid_values_are_ignored(rows, requests, ms):
    cost = learned(20)
    before = cost.to_dict()
    cost.observe(rows, requests, 0, ms)
    assert cost.to_dict() == before


OF = {"model": "m", "device": "d", "dtype": "bfloat16"}


def test_costs_are_restored_from_disk(tmp_path):
    cost, store = learned(), CostStore(tmp_path / "cache", OF, 64)
    assert store.save(cost) == ""
    back, reason = store.load()
    assert reason == "" and back.steps == cost.steps
    rows = np.arange(1, 65)
    assert back.ms(rows, 1, 1) == pytest.approx(cost.ms(rows, 1, 1), rel=1e-3)
    assert CostStore(tmp_path, OF | {"dtype": "float16"}, 64).path.name != store.path.name
    store.path.unlink()
    assert store.save(cost) == "" and not store.path.exists()  # nothing has changed


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format"', '"format', "is not JSON"),
        ('"format": 5', '"format": 4', "another engine or version"),
        ("bfloat16", "float16", "another engine or version"),
        ('"max_rows": 64', '"max_rows": 32', "not a step-cost document"),
        ('"max_rows": 64', '"max_rows": 63', "63 rows"),
        ('"steps"', '"stops"', "not a step-cost document"),
        ('"log_curves": [', '"log_curves": [[99.0], ', "not a step-cost document"),
    ],
)
def test_bad_files_are_ignored_with_a_reason(tmp_path, old, new, says):
    store = CostStore(tmp_path, OF, 64)
    store.save(learned(60))
    store.path.write_text(store.path.read_text().replace(old, new))
    cost, reason = store.load()
    assert cost.steps == 0 and says in reason


def test_a_missing_file_is_not_an_error_but_an_unusable_folder_is(tmp_path):
    cost, reason = CostStore(tmp_path, OF, 64).load()
    assert (cost.steps, reason) == (0, "")
    (tmp_path / "file").touch()
    assert "can't be written" in CostStore(tmp_path / "file", OF, 64).save(learned(60))


def test_a_single_knot_is_near_the_curve():
    """Whether or not the others were updated before; the curve takes its neighbors into account."""
    one, other = StepCost(64), StepCost(64)
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, requests = int(rng.integers(4, 64)), int(rng.integers(1, 5))
        for cost in (one, other):
            cost.observe(rows, requests, 2, 10.0 + rows)
        assert one.plain_ms(8) == pytest.approx(float(one.ms(8, 8, 0)), rel=0.1)
    assert one.plain_ms(8) == pytest.approx(other.plain_ms(8))
    expected = float(one.ms(9, 4, 2))
    assert one.observe(9, 4, 2, 12.0) == pytest.approx(expected, rel=0.05)
    assert one.observe(0, 4, 2, 12.0) is None


def test_a_count_that_was_slow_and_not_run_again_follows_its_neighbors():
    cost, rng = learned(800), np.random.default_rng(1)
    for _ in range(3):
        cost.observe(12, 4, 1, 1.5 * curve(12, 4, 1))
    assert float(cost.ms(12, 4, 1)) > 1.1 * curve(12, 4, 1)
    for _ in range(500):
        rows = int(rng.choice([10, 14]))
        cost.observe(rows, 4, 1, curve(rows, 4, 1) * float(np.exp(rng.normal(0, 0.05))))
    assert float(cost.ms(12, 4, 1)) == pytest.approx(curve(12, 4, 1), rel=0.08)


@pytest.mark.parametrize(
    "slow",
    [
        lambda step, rng: 1.0,
        lambda step, rng: 2.0 if step % 500 < 20 else 1.0,
        lambda step, rng: 1.5 if rng.random() < 0.05 else 1.0,
        lambda step, rng: 10.0 if rng.random() < 0.01 else 1.0,
    ],
    ids=["even", "bursts", "slow steps", "outliers"],
)
def test_counts_that_do_not_run_do_not_drift(slow):
    """While a machine serves one or two requests."""
    cost, rng = StepCost(128), np.random.default_rng(0)
    for n in (1, 2, 4, 8, 16, 32, 64) * 3:
        for rows, limit in ((n, 0), (2 * n, 1)):
            cost.observe(rows, n, limit, curve(rows, n, limit))
    cost = StepCost.from_dict(cost.to_dict())  # as after start-up
    for step in range(25_000):
        requests, limit = int(rng.integers(1, 3)), int(rng.random() < 0.9)
        rows = requests * (1 + int(rng.integers(2, 9))) if limit else requests
        ms = curve(rows, requests, limit) * slow(step, rng) * float(np.exp(rng.normal(0, 0.07)))
        cost.observe(rows, requests, limit, ms)
    for rows, requests, limit in ((8, 8, 0), (64, 64, 0), (65, 1, 1), (128, 64, 1)):
        found = float(cost.ms(rows, requests, limit)) / curve(rows, requests, limit)
        assert 0.8 < found < 1.2, (rows, requests, found)
