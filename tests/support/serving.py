"""A simulated server, with known step costs and acceptance, for the budget.

The budget receives noisy values; it is evaluated by their expectation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_medusa.budget.acceptance import Acceptance, Drafted
from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.policy import Auto, Fixed

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
        """Tokens per millisecond between two steps."""
        return sum(self.tokens[start:stop]) / sum(self.ms[start:stop])

    def against(self, other: Record, start: int = 0, window: int = 100) -> float:
        """Mean over windows of the speed relative to another record, for any load in each."""
        stops = range(start, len(self.ms), window)
        return float(
            np.mean([self.speed(i, i + window) / other.speed(i, i + window) for i in stops])
        )


def drafts(rng: np.random.Generator, requests: int, sure: float) -> np.ndarray:
    """[requests, NODES] survivals, best first: a chain of five with two siblings at each depth."""
    heads = rng.beta(2 * sure, 2 * (1 - sure), (requests, 5))
    reached = np.concatenate([np.ones((requests, 1)), heads.cumprod(1)[:, :-1]], 1)
    beside = reached * (1 - heads)
    every = np.concatenate([reached * heads, 0.5 * beside, 0.25 * beside], 1)
    return -np.sort(-every, axis=1)[:, :NODES]


def serve(server: Server, steps: int, arm: int | Auto, seed: int = 0) -> Record:
    """Run a number of steps with a fixed number of nodes per request, or with a policy.

    A policy that is ``even`` is called as by an asynchronous scheduler.
    """
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    record, survival, limit = Record(), None, 0
    policy = arm if isinstance(arm, Auto) else None
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
                counts = np.array(Fixed(NODES).counts(offered, requests, maximum))
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
            policy.observe(requests + nodes, requests, share, measured, tokens)
            if survival is not None:
                policy.observe_drafts(offered, counts, accepted)
        record.nodes.append(nodes)
        record.drafting.append(policy.drafting if policy else limit > 0)
        record.tokens.append(requests + float(expected.sum()))
        record.ms.append(true)
        survival = drawn[:, :limit] if limit else None
    return record


def new_policy(cost: StepCost | None = None, *, even: bool = False) -> Auto:
    return Auto(cost or StepCost(512), Acceptance(), NODES, HEADS, even=even)
