"""A server that isn't there: steps of known cost and drafts of known worth, for the budget.

What a budget is told is noisy; what it is judged by is the expectation of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_medusa.budget.choose import NodeBudget
from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.outlook import Outlook

NODES, HEADS = 12, 5  # candidates of a request
CPU = (
    (1, 4, 8, 16, 24, 32, 64, 128, 4096),
    (1.0, 1.1, 1.2, 1.4, 1.5, 2.0, 3.0, 5.8, 180.0),
)  # packed products on two cores


@dataclass
class Server:
    """What happens in a simulation.

    Attributes:
        base: rows and the step's number -> ms.
        requests: number of the step -> how many decode.
        sure: number of the step -> how sure heads are, in (0, 1).
        right: number of the step -> accepted against predicted.
        heads: ms for heads: at all, and a request; if all of them run.
        tree: ms for attention over drafts: at all, and a node.
        noise: of a step's time, relative.
        outliers: share of steps that take ten times as long.

    """

    base: Callable[[int, int], float]
    requests: Callable[[int], int] = lambda step: 1
    sure: Callable[[int], float] = lambda step: 0.5
    right: Callable[[int], float] = lambda step: 1.0
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
    drafted: list[bool] = field(default_factory=list)  # heads ran
    drafting: list[bool] = field(default_factory=list)  # tries aside
    tokens: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def speed(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens a millisecond from one step to another."""
        return sum(self.tokens[start:stop]) / sum(self.ms[start:stop])

    def against(self, other: Record, start: int = 0, window: int = 100) -> float:
        """Mean over windows of the speed against another's, whatever the load in each."""
        stops = range(start, len(self.ms), window)
        ratios = [self.speed(i, i + window) / other.speed(i, i + window) for i in stops]
        return float(np.mean(ratios))

    def switches(self, start: int = 0) -> int:
        """How often drafting began or ended, tries aside."""
        return int(np.abs(np.diff(np.array(self.drafting[start:], int))).sum())


def drafts(rng: np.random.Generator, requests: int, sure: float) -> np.ndarray:
    """[requests, NODES] survivals, best first: a spine of five with two siblings at each depth."""
    heads = rng.beta(2 * sure, 2 * (1 - sure), (requests, 5))
    reached = np.concatenate([np.ones((requests, 1)), heads.cumprod(1)[:, :-1]], 1)
    beside = reached * (1 - heads)
    every = np.concatenate([reached * heads, 0.5 * beside, 0.25 * beside], 1)
    return -np.sort(-every, axis=1)[:, :NODES]


def shared(survival: np.ndarray, total: int) -> np.ndarray:
    """[requests] how many of each request's are among the best of all."""
    order = np.argsort(-survival, axis=None, kind="stable")[:total]
    return np.bincount(order // survival.shape[1], minlength=len(survival))


def serve(server: Server, steps: int, arm: int | NodeBudget, seed: int = 0) -> Record:
    """Run a number of steps with a fixed number of nodes a request, or with a budget."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    record, survival, limit = Record(), None, 0
    budget = arm if isinstance(arm, NodeBudget) else None
    for step in range(steps):
        requests = server.requests(step)
        room = requests * NODES
        drawn = drafts(rng, requests, server.sure(step))  # the same for all arms
        if survival is not None and len(survival) != requests:
            survival = survival[:requests]  # who just came has none
        nodes, counts, expected = 0, np.zeros(0, int), np.zeros(0)
        if survival is not None:
            if budget:
                nodes = budget.choose(budget.outlook.gain_of(survival), requests, room)
            else:
                nodes = min(arm * requests, survival.size)
            counts = shared(survival, nodes)
            kept = np.arange(survival.shape[1])[None, :] < counts[:, None]
            expected = (survival * kept).sum(1) * server.right(step)
        before, limit = limit, budget.draft_next(requests, room) if budget else arm
        share = min(limit / HEADS, 1.0)
        true = server.ms(requests + nodes, requests, share, step)
        if budget:
            told = true * np.exp(noise.normal(0, server.noise))
            told *= 10.0 if noise.random() < server.outliers else 1.0
            budget.observe(requests + nodes, requests, share, told)
            if survival is not None:
                whole = np.floor(expected)
                accepted = whole + (noise.random(len(counts)) < expected - whole)
                budget.outlook.observe(survival, counts, accepted, limit=before)
        record.nodes.append(nodes)
        record.drafted.append(limit > 0)
        record.drafting.append(budget.drafting if budget else limit > 0)
        record.tokens.append(requests + float(expected.sum()))
        record.ms.append(true)
        survival = drawn[:, :limit] if limit else None
    return record


def new_budget(cost: StepCost | None = None) -> NodeBudget:
    return NodeBudget(cost or StepCost(512), Outlook(), NODES, HEADS)
