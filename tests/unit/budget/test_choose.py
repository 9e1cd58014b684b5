"""How many nodes: by what they are worth and cost, with room and without."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vllm_medusa.budget.choose import Forecast, NodeBudget
from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.outlook import Outlook


def budget(per_row: float, rough: float = 1.0, taus=(1.5, 1.7, 1.8, 1.85)) -> NodeBudget:
    """A machine whose steps get dearer by ``per_row`` a row; multiples of 4 by ``rough`` too."""
    cost = StepCost(64)
    for _ in range(30):
        for rows in range(1, 65):
            ms = (10 + 10 * per_row * rows) * (rough if rows % 4 == 0 else 1.0)
            cost.observe(rows, rows, False, ms)
            cost.observe(rows, 1, True, ms)
    return NodeBudget(cost, Outlook(taus), 4)


def test_dear_rows_get_no_nodes_and_cheap_ones_all():
    gain = np.array([0.0, 0.5, 0.7, 0.8, 0.85])
    dear, cheap = budget(2.0), budget(0.001)
    for each, drafts in ((dear, False), (cheap, True)):
        assert [each.draft_next(1, 64) > 0 for _ in range(5)] == [drafts] * 5
    assert dear.choose(gain, 1, 64) == 0
    assert cheap.choose(gain, 1, 64) == 4


def test_a_node_is_taken_as_long_as_it_pays():
    between = budget(0.1)
    assert between.draft_next(1, 64)
    nodes = between.choose([0.0, 0.5, 0.7, 0.8, 0.85], 1, 64)
    assert 1 <= nodes <= 3
    assert between.choose(np.arange(5) * 0.9, 1, 64) == 4  # surer drafts, more of them
    assert between.choose(np.arange(5) * 0.02, 1, 64) == 0


def test_cheap_row_counts_are_preferred():
    rough = budget(0.02, rough=1.2)
    rough.draft_next(1, 64)
    for slope in (0.3, 0.35, 0.4):
        assert (1 + rough.choose(slope * np.arange(13) ** 0.9, 1, 64)) % 4 != 0


@pytest.mark.parametrize("free", [0, 1, 3])
def test_no_more_than_there_is_room_for(free):
    cheap = budget(0.001)
    cheap.draft_next(1, 64)
    assert cheap.choose([0.0, 0.5, 0.7, 0.8, 0.85], 1, free) == free
    assert (cheap.draft_next(1, free) > 0) == (free > 0)


def test_nobody_and_nothing():
    each = budget(0.1)
    assert each.choose([0.0], 3, 64) == 0 and each.choose([0.0, 0.5], 0, 64) == 0
    assert not each.draft_next(0, 64)


def test_heads_do_not_run_for_drafts_that_stay_unused():
    """Beside prefills no drafts are verified: a narrow gain is then eaten up by the heads."""
    one = np.array([1])
    forecast = Forecast(1, one, one, np.array([0.5]), np.array([1.2]), 1.0, heads=1.1)
    ratios = [replace(forecast, unused=share).ratio for share in (0.0, 0.5, 1.0)]
    assert ratios == pytest.approx([1.2, 1.05, 0.9])
    each = budget(0.1)
    assert each.draft_next(1, 64) and not each.draft_next(1, 64, unused=1.0)


def test_near_equal_choices_stay():
    """Gains that tremble by less than a choice's worth don't move it."""
    each, rng = budget(0.06), np.random.default_rng(0)
    each.draft_next(1, 64)
    chosen = [
        each.choose(np.array([0.0, 0.5, 0.7, 0.8, 0.85]) * (1 + rng.normal(0, 0.002)), 1, 64)
        for _ in range(100)
    ]
    assert len(set(chosen)) == 1


def test_more_load_fewer_nodes():
    each = budget(0.03)
    per_request = []
    for requests in (1, 4, 16, 32):
        forecast = each.forecast(requests, 256)
        per_request.append(forecast.nodes / requests if forecast.ratio > 1 else 0.0)
    assert per_request == sorted(per_request, reverse=True) and per_request[0] > per_request[-1]


def test_a_table_that_was_never_measured_decides_too():
    each = NodeBudget(StepCost(32), Outlook(), 8)
    for _ in range(50):
        nodes = each.choose(np.array([0.0, 0.5, 0.7]), 2, 16)
        drafted = each.draft_next(2, 16)
        each.observe(2 + nodes, 2, drafted, 10.0)
    assert each.drafting and nodes == 2


@pytest.mark.parametrize(("ms", "most"), [(5.0, 170), (100.0, 1001)])
def test_thinking_takes_a_small_share_of_short_steps(ms, most):
    each = NodeBudget(StepCost(64), Outlook(), 15, 5)
    forecasts = []
    for _ in range(1000):
        each.draft_next(4, 60)
        forecasts.append(each.forecast(4, 60))
        each.observe(4, 4, 0.0, ms)
    assert most / 2 < len({id(forecast) for forecast in forecasts}) <= most
    assert most / 8 < each.cost.steps <= most
    assert each.tries.turn < most / 4


def test_after_a_surprise_it_learns_from_every_step():
    each = NodeBudget(StepCost(64), Outlook(), 15, 5)
    for step in range(200):
        each.observe(4, 4, 0.0, 5.0 if step < 190 else 50.0)
        if step == 189:
            before = each.cost.steps
    assert float(each.cost.ms(4, 4, 0.0)) > 25.0
    assert each.cost.surprises and each.cost.steps > before + 5


@pytest.mark.skipif(
    os.cpu_count() == 1 or not Path("/proc/self/schedstat").is_file(), reason="Linux, 2 cores"
)
def test_no_thread_but_its_own_works():
    """The model's threads have the cores: numpy's would slow the step that follows."""
    code = """
        import os
        import time
        from pathlib import Path
        import numpy as np
        from vllm_medusa.budget.choose import NodeBudget
        from vllm_medusa.budget.cost import StepCost
        from vllm_medusa.budget.outlook import Outlook

        def worked():
            tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6

        own = str(os.getpid())
        start = -1.0
        while start != (now := worked()):  # threads that start spin for a while
            start = now
            time.sleep(0.2)
        budget = NodeBudget(StepCost(1024), Outlook(), 63, 5)
        for step in range(200):
            limit = budget.draft_next(16, 1000)
            budget.observe(16, 16, budget.share_of(limit), 30.0 + step % 7)
        print(budget.tries.turn, worked() - start)
    """
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    tries, ms = done.stdout.split()
    assert int(tries) > 5
    assert float(ms) < 1.0
