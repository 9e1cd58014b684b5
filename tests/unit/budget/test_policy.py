"""The automatic budget on simulated servers: near the best fixed choice, never slower than plain.

A server has known step costs and acceptance. The budget receives noisy values; it is evaluated by
their expectation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.expected_acceptance import Drafted, ExpectedAcceptance
from vllm_medusa.budget.policy import AutoBudget, FixedBudget

STEPS = 1200
FIXED = (0, 1, 2, 3, 4, 6, 8, 12)
NODES, HEADS = 12, 5  # candidates per request
CPU = (
    (1, 4, 8, 16, 24, 32, 64, 128, 4096),
    (1.0, 1.1, 1.2, 1.4, 1.5, 2.0, 3.0, 5.8, 180.0),
)  # packed products on two cores


@dataclass
class Server:
    """Parameters of a simulation.

    Attributes:
        base: rows and step number -> ms.
        requests: step number -> number of decoding requests.
        sure: step number -> confidence of the heads, in (0, 1).
        right: accepted relative to predicted tokens.
        heads: ms for all heads: fixed, and per request.
        tree: ms for attention over drafts: fixed, and per node.
        noise: relative noise of a step's time.
        outliers: fraction of steps that take ten times as long.

    """

    base: Callable[[int, int], float]
    requests: Callable[[int], int] = lambda step: 1
    sure: Callable[[int], float] = lambda step: 0.5
    right: float = 1.0
    heads: tuple[float, float] = (1.5, 0.05)
    tree: tuple[float, float] = (1.5, 0.05)
    noise: float = 0.1
    outliers: float = 0.0

    def ms(self, rows: int, requests: int, share: float, step: int) -> float:
        found = self.base(rows, step)
        if rows > requests:
            found += self.tree[0] + self.tree[1] * (rows - requests)
        return found + share * (self.heads[0] + self.heads[1] * requests)


@dataclass
class Record:
    """[steps] each."""

    nodes: list[int] = field(default_factory=list)
    drafting: list[bool] = field(default_factory=list)  # without trials
    tokens: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def speed(self, start: int = 0, stop: int | None = None) -> float:
        return sum(self.tokens[start:stop]) / sum(self.ms[start:stop])

    def against(self, other: Record) -> float:
        """Mean over windows of 100 steps of the speed relative to another record."""
        windows = [(start, start + 100) for start in range(0, len(self.ms), 100)]
        return float(np.mean([self.speed(*each) / other.speed(*each) for each in windows]))


def drafts(rng: np.random.Generator, requests: int, sure: float) -> np.ndarray:
    """[requests, NODES] survivals, best first: a chain of five with two siblings at each depth."""
    heads = rng.beta(2 * sure, 2 * (1 - sure), (requests, 5))
    reached = np.concatenate([np.ones((requests, 1)), heads.cumprod(1)[:, :-1]], 1)
    beside = reached * (1 - heads)
    every = np.concatenate([reached * heads, 0.5 * beside, 0.25 * beside], 1)
    return -np.sort(-every, axis=1)[:, :NODES]


def serve(server: Server, steps: int, arm: int | AutoBudget) -> Record:
    """Run a number of steps with a fixed number of nodes per request, or with a policy.

    A policy that is ``even`` is called as by an asynchronous scheduler.
    """
    rng, noise = np.random.default_rng(0), np.random.default_rng(1)
    record, survival, limit = Record(), None, 0
    policy = arm if isinstance(arm, AutoBudget) else None
    for step in range(steps):
        requests = server.requests(step)
        room = requests * NODES
        drawn = drafts(rng, requests, server.sure(step))  # the same for all arms
        if survival is not None and len(survival) != requests:
            survival = survival[:requests]  # new requests have no drafts
        counts, expected = np.zeros(0, int), np.zeros(0)
        if survival is not None:
            limited = limit if limit < NODES else None
            offered = [Drafted(values, limit=limited) for values in survival]
            if policy and not policy.even:
                counts = np.array(policy.counts(offered, requests, room))
            else:
                maximum = survival.size if policy else int(arm) * requests
                counts = np.array(FixedBudget(NODES).counts(offered, requests, maximum))
            kept = np.arange(survival.shape[1])[None, :] < counts[:, None]
            expected = (survival * kept).sum(1) * server.right
        nodes = int(counts.sum())
        limit = policy.limit(requests, room) if policy else arm
        share = min(limit / HEADS, 1.0)
        true = server.ms(requests + nodes, requests, share, step)
        if policy:
            whole = np.floor(expected)
            accepted = whole + (noise.random(len(counts)) < expected - whole)
            measured = true * np.exp(noise.normal(0, server.noise))
            measured *= 10.0 if noise.random() < server.outliers else 1.0
            tokens = requests + accepted.sum()
            policy.observe(requests + nodes, requests, limit, measured, tokens)
            if survival is not None:
                policy.observe_drafts(offered, counts, accepted)
        record.nodes.append(nodes)
        record.drafting.append(policy.drafting if policy else limit > 0)
        record.tokens.append(requests + float(expected.sum()))
        record.ms.append(true)
        survival = drawn[:, :limit] if limit else None
    return record


def new_policy(cost: StepCost | None = None, *, even: bool = False) -> AutoBudget:
    return AutoBudget(cost or StepCost(512), ExpectedAcceptance(), NODES, HEADS, even=even)


def cpu(rows: int, step: int = 0) -> float:
    return 18.0 * float(np.interp(rows, *CPU))


def steep(rows: int, step: int = 0) -> float:
    return 15.0 + 4.0 * rows


def gpu(rows: int, step: int = 0) -> float:
    """Free rows up to a limit, then a cost per row."""
    return 8.0 + 0.01 * max(0, rows - 150)


def varying_memory(rows: int, step: int) -> float:
    """Memory one third faster and slower; with faster memory, rows cost relatively more."""
    fast = np.sin(step / 250.0)
    return 18.0 * (1.0 - 0.3 * fast) * float(np.interp(rows, *CPU)) ** (1.0 + 0.4 * fast)


def batch(requests: int):
    return lambda step: requests


def ramp(step: int) -> int:
    return 1 + int(23 * (0.5 - 0.5 * np.cos(2 * np.pi * step / STEPS)))


SERVERS = {
    "cpu, 1": Server(cpu),
    "cpu, 4": Server(cpu, batch(4)),
    "cpu, 16": Server(cpu, batch(16)),
    "cpu, 64": Server(cpu, batch(64)),
    "gpu, 1": Server(gpu),
    "gpu, 64": Server(gpu, batch(64)),
    "expensive rows, 1": Server(steep),
    "expensive rows, 8": Server(steep, batch(8)),
    "expensive rows, unsure, 2": Server(steep, batch(2), lambda step: 0.2),
    "memory varies, 8": Server(varying_memory, batch(8)),
    "twice as slow later": Server(lambda rows, step: cpu(rows) * (1 + (step > 600)), batch(4)),
    "confidence rises": Server(cpu, batch(8), lambda step: 0.1 if step < 600 else 0.7),
    "underconfident": Server(cpu, batch(8), lambda step: 0.3, 1.5),
    "overconfident": Server(cpu, batch(8), right=0.4),
    "outliers": Server(cpu, batch(4), outliers=0.01),
    "ramp": Server(cpu, ramp),
}


@cache
def fixed(name: str) -> dict[int, Record]:
    return {nodes: serve(SERVERS[name], STEPS, nodes) for nodes in FIXED}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("name", SERVERS)
def test_near_the_best_fixed_choice_and_never_slower_than_plain(name, even):
    """From the first step, without data; ``even``: as for an asynchronous scheduler."""
    plain = fixed(name)[0]
    speed = serve(SERVERS[name], STEPS, new_policy(even=even)).against(plain)
    best_speed = max(record.against(plain) for record in fixed(name).values())
    assert speed >= 0.98
    assert speed >= 0.93 * best_speed, (speed, best_speed)


@pytest.mark.parametrize("gain", [0.9, 0.97, 1.0])
@pytest.mark.parametrize("requests", [1, 16])
def test_drafting_pauses_if_the_gain_is_small(gain, requests):
    """Steps of 20 ms; drafts are ``gain`` times as fast as plain steps."""

    def hardly(rows: int, step: int = 0) -> float:
        return 20.0 if rows <= requests else 20.0 * cost_factor

    cost_factor = 1.0
    server = Server(hardly, batch(requests), heads=(0.0, 0.0), tree=(0.0, 0.0), noise=0.05)
    plain = serve(server, STEPS, 0)
    cost_factor = serve(server, STEPS, NODES).speed() / plain.speed() / gain
    record = serve(server, STEPS, new_policy())
    assert record.speed() >= 0.985 * plain.speed()
    assert np.mean(record.drafting) < (0.2 if gain < 1 else 0.6)


def test_drafting_ends_where_it_is_slower_than_expected():
    """Even if costs and acceptance suggest otherwise: here acceptance is far overestimated."""
    server = Server(cpu, batch(4), lambda step: 0.9, 0.05)
    policy = new_policy()
    policy.acceptance.corrected = lambda draft: [*draft.survival]  # type: ignore[method-assign]
    record, plain = serve(server, 2 * STEPS, policy), serve(server, 2 * STEPS, 0)
    assert 0 < np.mean(record.drafting) < 0.3
    assert record.speed(STEPS) >= 0.97 * plain.speed(STEPS)
    assert policy.expected_ratio < 1  # the measured one, in a pause


def test_trials_cost_less_than_one_percent():
    server = Server(steep, batch(8), lambda step: 0.1, noise=0.05)
    policy = new_policy()
    record, plain = serve(server, 2 * STEPS, policy), serve(server, 2 * STEPS, 0)
    assert record.speed(200) >= 0.99 * plain.speed(200) and policy.trials > 3
    assert policy.speed_of_copies.steps == 0


@pytest.mark.parametrize("requests", [1, 16, 64])
def test_a_confident_drafter_that_is_always_wrong(requests):
    """From the first step, with costs unknown: what is tried costs more than estimated."""
    server = Server(cpu, batch(requests), lambda step: 0.9, 0.0, noise=0.05)
    record, plain = (serve(server, 2 * STEPS, each) for each in (new_policy(), 0))
    assert record.speed(300) >= 0.985 * plain.speed(300)


def test_trials_at_rest_are_charged_what_they_cost():
    """If steps with heads take three times as long as estimated, fewer are tried."""

    def trials(slow: float) -> int:
        policy = policy_at(2.0)
        ms = policy.cost.plain_ms(1)
        policy.cost.observe = lambda *_: None  # type: ignore[method-assign]  # estimates stay
        for _ in range(8000):
            limit = policy.limit(1, 4)
            policy.observe(1, 1, limit, ms * (slow if limit else 1.0), 1.0)
            assert not policy.drafting
        return policy.trials

    assert 0 < trials(3.0) < 0.5 * trials(1.0)


@pytest.mark.parametrize("wrong", [1 / 3, 3.0])
@pytest.mark.parametrize("name", ["cpu, 1", "cpu, 4", "expensive rows, 8"])
def test_wrong_tables_are_corrected(name, wrong):
    """Measured tree costs were three times too high or too low."""
    server, cost = SERVERS[name], StepCost(512)
    for _ in range(20):
        for requests in (1, 2, 4, 8):
            for each in (1, 2, 3, 5, 9, 13):
                rows, limit = requests * each, HEADS * (each > 1)
                ms = server.ms(rows, requests, float(each > 1), 0) * (wrong if limit else 1.0)
                cost.observe(rows, requests, limit, ms)
    policy = new_policy(StepCost.from_dict(cost.to_dict()))
    speed = serve(server, STEPS, policy).speed(500)
    assert speed >= 0.92 * max(record.speed(500) for record in fixed(name).values())


def test_larger_trees_that_were_slow_once_are_tried_again():
    """Their own limits have to be tried with all nodes, not with the number that seems best."""
    server = Server(cpu, batch(1), heads=(1.5, 0.0), tree=(0.5, 0.05), noise=0.07)
    cost = StepCost(512)
    shapes = [(1, 0), *itertools.product((2, 3, 4, 5, 6, 7, 9), (1, 2, 4, HEADS))]
    for rows, limit in shapes * 300:
        ms = server.ms(rows, 1, min(limit / HEADS, 1.0), 0) * (1.25 if rows > 3 else 1.0)
        cost.observe(rows, 1, limit, ms)
    record = serve(server, 3 * STEPS, new_policy(cost))
    assert np.mean(record.nodes[:100]) < 3
    assert record.speed(STEPS) >= 0.97 * serve(server, STEPS, 8).speed()


def test_every_other_trial_is_of_plain_steps():
    """So is the first after a change of the machine, which may affect only steps with drafts."""
    policy, tried = policy_at(0.001), []
    for _ in range(800):
        before = policy.trials
        policy.limit(1, 4)
        policy.observe(5, 1, 4, 10.0, 2.0)
        if policy.trials > before:
            tried.append(policy._trial)
    assert policy.drafting and len(tried) > 8
    assert [trial == (0, 0) for trial in tried[:8]] in ([True, False] * 4, [False, True] * 4)
    policy.turn, policy._trial_left = 1, 0
    policy.cost.surprises += 1
    assert policy.limit(1, 4) == 0 and policy._trial == (0, 0)


def test_equal_observations_give_equal_decisions():
    first, second = (serve(SERVERS["cpu, 4"], 300, new_policy()) for _ in range(2))
    assert first == second


def policy_at(per_row: float) -> AutoBudget:
    """A machine whose steps take a fixed share longer per row; heads take no time."""
    cost = StepCost(64)
    for _ in range(30):
        for rows in range(1, 65):
            for requests in {1, rows}:
                cost.observe(rows, requests, int(requests < rows), 10 + 10 * per_row * rows)
    policy = AutoBudget(cost, ExpectedAcceptance((1.5, 1.7, 1.8, 1.85)), 4)
    policy.limit(1, 64)
    return policy


DRAFTS = [Drafted([0.5, 0.2, 0.1, 0.05])]


@pytest.mark.parametrize(("per_row", "nodes"), [(2.0, [0]), (0.1, [1, 2, 3]), (0.001, [4])])
def test_a_node_is_verified_if_it_saves_time(per_row, nodes):
    policy = policy_at(per_row)
    assert policy.drafting == (per_row < 1)
    assert policy.counts(DRAFTS, 1, 64)[0] in nodes


def test_likelier_requests_get_more():
    policy = policy_at(0.1)
    uncertain, confident = policy.counts([Drafted([0.02] * 4), Drafted([0.9] * 4)], 2, 64)
    assert uncertain == 0 and confident == 4


@pytest.mark.parametrize("room", [0, 1, 3])
def test_no_more_than_fit(room):
    policy = policy_at(0.001)
    assert policy.counts(DRAFTS, 1, room) == [room]
    assert (policy.limit(1, room) > 0) == (room > 0)


def test_without_steps_nothing_is_tried():
    policy = new_policy()
    assert {policy.limit(4, 48) for _ in range(40)} <= {0, *policy.limits} and not policy.trials


def test_no_requests_and_no_drafts():
    policy = policy_at(0.001)
    assert policy.limit(0, 64) == 0 and policy.counts([Drafted([])], 1, 64) == [0]
    assert policy.counts(DRAFTS, 0, 64) == [0]


@pytest.mark.parametrize(("per_row", "nodes"), [(0.1, 4), (2.0, 1), (40.0, 0)])
def test_beside_a_prefill_a_node_takes_as_long_as_a_row_of_a_prompt(per_row, nodes):
    """At 0.18 tokens per ms; milliseconds per row."""
    policy = policy_at(0.001)
    for _ in range(30):
        policy.observe_prefill(4, 0, 1, 0, 10.0 + 4 * per_row)  # 10 ms without the prompt
    assert policy.counts(DRAFTS, 1, 64, prefill=True) == [nodes]
    assert policy.counts(DRAFTS, 1, 64) == [4]
    assert policy.pays_beside_prefill(4, 1) == (nodes == 4)


def test_heads_do_not_run_for_drafts_that_stay_unused():
    """Drafts of a step before one that a prefill fills are not verified."""
    server = Server(cpu)
    policy = new_policy()
    serve(server, 200, policy)
    assert policy.drafting
    for _ in range(20):
        policy.limit(1, NODES, full=1.0)
    assert not policy.drafting


def test_copied_drafts_are_used_without_heads():
    policy = AutoBudget(StepCost(64), ExpectedAcceptance((1.05,)), 8, top_limit=0)
    for _ in range(50):
        policy.observe(5, 1, 0, 11.0, 4.0)
        policy.observe(1, 1, 0, 10.0, 1.0)
        policy.acceptance.observe([Drafted([0.9] * 4, 0, 0, [2] * 4)], [4], [0])
    assert policy.limit(1, 8) == 0
    assert policy.counts([Drafted([0.9] * 4, 0, 0, [2] * 4)], 1, 8) == [4]
    assert policy.forced_pay


@pytest.mark.parametrize(("ms", "pays"), [(11.0, True), (16.0, False)])
def test_copies_pause_while_they_are_slower(ms, pays):
    """Every other step has copies, half of them accepted; costs and survivals suggest a gain."""
    policy = AutoBudget(StepCost(64), ExpectedAcceptance((1.05,)), 8, top_limit=0)
    policy.cost.ms = lambda rows, *_: 10.0 + 0.01 * np.asarray(rows)  # type: ignore[method-assign]
    copies, chosen = Drafted([0.9], 0, 0, [2]), []
    for step in range(2000):
        policy.limit(1, 8)
        policy.observe(1, 1, 0, 10.0, 1.0)
        (count,) = policy.counts([copies], 1, 8)
        policy.observe(1 + count, 1, 0, ms if count else 10.0, 1.0 + step % 2 * count)
        policy.observe_drafts([copies], [count], [0])
        chosen.append(count)
    assert np.mean(chosen) == 1 if pays else np.mean(chosen) < 0.25


@pytest.mark.parametrize(
    ("total", "expected"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (3, [2, 0, 1]), (9, [2, 1, 2])]
)
def test_the_best_are_kept_and_ties_go_to_the_first(total, expected):
    drafts = [Drafted([0.9, 0.5]), Drafted([0.3]), Drafted([0.5, 0.1])]
    assert FixedBudget(2).counts(drafts, 3, total) == expected


def test_costs_are_updated_rarely_while_drafting_is_off():
    """So that idle drafting costs no more than no trees; initially every step updates costs."""
    policy, taught = AutoBudget(StepCost(64), ExpectedAcceptance([1.0] * 4), 4, 4), []
    for _ in range(400):
        policy._saved = 0.0  # no trials
        assert policy.limit(1, 4) == 0
        before = policy.cost.steps
        policy.observe(1, 1, 0, 5.0, 1.0)
        taught.append(policy.cost.steps - before)
    assert all(taught[:64])
    assert sum(taught[100:]) == 15  # one in 20 or 21, at 5 ms a step
    assert policy._now == pytest.approx(400 * 5.0)
    for _ in range(64):  # the machine is slower now
        policy.limit(1, 4)
        policy.observe(1, 1, 0, 15.0, 1.0)
    assert policy.cost.plain_ms(1) == pytest.approx(15.0, rel=0.1)


def test_acceptance_is_updated_rarely_while_drafting():
    """It takes time; except at first, and for copies, whose absence is always recorded."""
    policy = AutoBudget(StepCost(64), ExpectedAcceptance(), 4, 4)
    recorded = []
    policy.acceptance.observe = lambda drafts, *_: recorded.append(drafts[0].copied)
    for copied, expected in ((None, 64 + 136 // 10), ([1], 200)):
        recorded.clear()
        for _ in range(200):
            policy.observe(2, 1, 1, 10.0, 1.0)
            policy.observe_drafts([Drafted([0.5], copied=copied)], [1], [1])
        assert len(recorded) == expected


def test_costs_are_updated_rarely_from_equal_fast_steps():
    """Except at first, and by steps that differ from the last one that was used."""
    policy = policy_at(0.001)
    assert policy.drafting
    for nodes, expected in (((4, 4), 4 + 64 + 132 // 20), ((4, 3), 200)):  # 4: it is faster now
        policy._learned_steps, before = 0, policy.cost.steps
        for step in range(200):
            policy.observe(1 + nodes[step % 2], 1, 4, 5.0, 2.0)
        assert policy.cost.steps - before == pytest.approx(expected, abs=1)
    assert policy._now == pytest.approx(400 * 5.0) and policy.speed.steps == 400
