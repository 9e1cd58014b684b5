"""The budget on simulated servers: as fast as what an expert would have picked, never slower."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.serving import CPU, NODES, Record, Server, new_budget, serve

from vllm_medusa.budget.cost import StepCost

STEPS = 1600
FIXED = (0, 1, 2, 4, 8)


def cpu(rows: int, step: int = 0) -> float:
    return 18.0 * float(np.interp(rows, *CPU))


def steep(rows: int, step: int = 0) -> float:
    return 15.0 + 4.0 * rows


def rough(rows: int, step: int = 0) -> float:
    return cpu(rows) * (1.12 if rows % 4 == 0 else 1.0)


def wandering(rows: int, step: int) -> float:
    """Memory by half faster and slower; the faster, the dearer are rows beside it."""
    fast = np.sin(step / 250.0)
    return 18.0 * (1.0 - 0.3 * fast) * float(np.interp(rows, *CPU)) ** (1.0 + 0.4 * fast)


def twice_as_slow_later(rows: int, step: int) -> float:
    return cpu(rows) * (2.0 if step > STEPS // 2 else 1.0)


def batch(requests: int):
    return lambda step: requests


def ramp(step: int) -> int:
    """From one to 24 requests and down."""
    return 1 + int(23 * (0.5 - 0.5 * np.cos(2 * np.pi * step / STEPS)))


SERVERS = {
    "cpu, 1": Server(cpu),
    "cpu, 4": Server(cpu, batch(4)),
    "cpu, 16": Server(cpu, batch(16)),
    "dear rows, 1": Server(steep),
    "dear rows, 8": Server(steep, batch(8)),
    "dear rows, unsure, 2": Server(steep, batch(2), lambda step: 0.2),
    "cheap and dear counts, 4": Server(rough, batch(4)),
    "memory wanders, 8": Server(wandering, batch(8)),
    "twice as slow later": Server(twice_as_slow_later, batch(4)),
    "traffic gets sure": Server(cpu, batch(8), lambda step: 0.1 if step < 800 else 0.7),
    "underconfident": Server(cpu, batch(8), lambda step: 0.3, lambda step: 1.5),
    "outliers": Server(cpu, batch(4), outliers=0.01),
    "ramp": Server(cpu, ramp),
}


@cache
def fixed(name: str) -> dict[int, Record]:
    return {nodes: serve(SERVERS[name], STEPS, nodes) for nodes in FIXED}


@pytest.mark.parametrize("name", SERVERS)
def test_as_fast_as_the_best_fixed_choice_and_never_slower(name):
    """Without a table, from the first step on; of the load at each time, not of the tokens."""
    arms = fixed(name)
    found = [serve(SERVERS[name], STEPS, new_budget(), seed).against(arms[0]) for seed in (0, 1)]
    best = max(record.against(arms[0]) for record in arms.values())
    assert min(found) >= 0.98, found
    assert np.mean(found) >= 0.97 * best, (found, best)


def table(server: Server, wrong: float) -> StepCost:
    """What was measured when trees were ``wrong`` times as dear as they are."""
    cost = StepCost(512)
    for _ in range(20):
        for requests in (1, 2, 4, 8):
            for each in (1, 2, 3, 5, 9, 13):
                rows, drafted = requests * each, each > 1
                ms = server.ms(rows, requests, drafted, 0) * (wrong if drafted else 1.0)
                cost.observe(rows, requests, drafted, ms)
    return StepCost.from_dict(cost.to_dict())


@pytest.mark.parametrize("wrong", [1 / 3, 1.0, 3.0])
@pytest.mark.parametrize("name", ["cpu, 1", "cpu, 4", "dear rows, 8"])
def test_wrong_tables_are_unlearned(name, wrong):
    """Three times too dear or too cheap: after 400 steps nothing of it is left."""
    server = SERVERS[name]
    best = max(record.speed(400) for record in fixed(name).values())
    record = serve(server, STEPS, new_budget(table(server, wrong)))
    assert record.speed(400) >= 0.97 * best, record.speed(400) / best


@pytest.mark.parametrize("least", [1, 5])
def test_a_machine_that_slows_down_is_not_left_at_nothing(least):
    """Steps of ``least`` rows or more take five times as long for a while, and then all is well."""

    def disturbed(rows: int, step: int) -> float:
        return cpu(rows) * (5.0 if 300 <= step < 700 and rows >= least else 1.0)

    server = Server(disturbed, batch(4))
    record = serve(server, 2 * STEPS, new_budget())
    before, meanwhile = np.mean(record.nodes[200:300]), np.mean(record.nodes[550:700])
    assert meanwhile > 0.8 * before if least == 1 else meanwhile < 0.2 * before
    best = max(serve(server, 2 * STEPS, nodes).speed(2400) for nodes in FIXED)
    assert record.speed(2400) >= 0.97 * best


@pytest.mark.parametrize("better", [0.99, 1.0, 1.01])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_crossing_does_not_oscillate(better, seed):
    """Plain steps and drafts within a hundredth of each other: few switches, and nothing lost."""

    def crossing(rows: int, step: int) -> float:
        return 20.0 if rows <= 4 else 20.0 * dear

    dear = 1.0
    server = Server(crossing, batch(4), heads=(0.0, 0.0), tree=(0.0, 0.0), noise=0.05)
    plain = serve(server, STEPS, 0).speed()
    dear = serve(server, STEPS, NODES).speed() / plain / better
    record = serve(server, STEPS, new_budget(), seed)
    assert record.switches(400) <= 16
    assert record.speed() >= 0.98 * plain


def test_tries_cost_less_than_a_hundredth():
    """Drafts that never pay: what is spent on finding that out."""
    server = Server(steep, batch(8), lambda step: 0.1, noise=0.05)
    budget = new_budget()
    record, plain = serve(server, 2 * STEPS, budget), serve(server, 2 * STEPS, 0)
    assert record.speed(200) >= 0.992 * plain.speed(200)
    assert record.speed() >= 0.99 * plain.speed() and budget.tries.count > 3


def test_plain_steps_are_seen_while_it_drafts():
    """A step without heads behind one without drafts: what all is compared with."""
    record = serve(SERVERS["cpu, 1"], 800, new_budget())
    plain = [
        step
        for step in range(400, 800)
        if record.drafting[step] and not record.nodes[step] and not record.drafted[step]
    ]
    assert plain


def test_equal_servers_give_equal_decisions():
    first, second = (serve(SERVERS["cpu, 4"], 300, new_budget()) for _ in range(2))
    assert first == second
