"""The best limit of nodes for a batch, and what each alternative is expected to bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats, StepCost
from vllm_medusa.budget.expected_acceptance import RANGE_ENDS, ExpectedAcceptance

FORCED_PAY = 1.5  # min expected speed with drafts without heads for which searching them pays off


@dataclass(frozen=True)
class Plan:
    """Expected values for a batch with and without heads.

    Attributes:
        requests: number of requests in the batch.
        room: max draft nodes of the step.
        limit: the best limit with heads, above 0; 0: no room for drafts.
        ratio: speed with heads relative to the best without.
        rate: tokens per millisecond with heads.
        rate_without: the same without: plain steps, or steps that verify copies.
        heads: time of a step with these heads relative to one without.
        forced_pay: whether to search for copies and tokens forced by a grammar.
        arms: [n, 4] all alternatives: limit, nodes, tokens per millisecond and time
            of a step; the first drafts nothing.

    """

    requests: int
    room: int
    limit: int
    ratio: float
    rate: float
    rate_without: float
    heads: float
    forced_pay: bool
    arms: Floats


class Planner:
    """Compares the alternatives for a batch by step costs and acceptance.

    Attributes:
        limits: limits to choose from; empty if there are no heads and limits may differ by request.

    """

    def __init__(
        self,
        cost: StepCost,
        acceptance: ExpectedAcceptance,
        max_drafts: int,
        top_limit: int,
        *,
        even: bool,
    ) -> None:
        """Create the planner; the arguments are those of `policy.AutoBudget`."""
        self.cost, self.acceptance = cost, acceptance
        self.max_drafts, self.top_limit, self.even = max_drafts, top_limit, even
        highest = max_drafts if even else min(top_limit, max_drafts)
        ends = [n for n in RANGE_ENDS if n < highest]
        self.limits = [*ends, max_drafts] if top_limit or even else []

    def plan(self, requests: int, room: int, *, copies: bool) -> Plan:
        """Expected values for a batch with that room; ``copies``: whether they may be verified."""
        limits, nodes, gain = self._alternatives(requests, room)
        ms = self.cost.ms(requests + nodes, requests, self.work(limits))
        rates = (requests + requests * gain) / ms
        without = limits == 0
        alone = float(rates[without].max() if copies else rates[0])
        limit, rate, heads = 0, alone, 1.0
        if not without.all():
            place = int(np.where(without, 0.0, rates).argmax())
            limit, rate = int(limits[place]), float(rates[place])
            heads = float(self.cost.ms(requests, requests, self.work(limit)) / ms[0])
        forced_pay = alone > FORCED_PAY * float(rates[0])
        arms = np.stack([limits, nodes, rates, ms], 1)
        return Plan(requests, room, limit, rate / alone, rate, alone, heads, forced_pay, arms)

    def _alternatives(
        self, requests: int, room: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
        """Limits, total nodes and accepted tokens per request: [n] each; first: no drafts."""
        limits, nodes, gains = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [np.zeros(1)]
        powers = np.round(2.0 ** np.arange(0, np.log2(max(room, 1)) + 0.01, 0.5))
        sizes = np.unique(np.append(powers, room)).astype(np.int64)
        sizes = sizes[(sizes > 0) & (sizes <= room)]
        for limit in self.limits if self.even else (0, *self.limits):
            if self.even:
                some = np.array([requests * limit] if requests * limit <= room else [], np.int64)
                gain = np.full(len(some), self.even_gain(limit))
            else:
                reach = room if self.acceptance.copies else requests * limit
                some = sizes[sizes <= reach]
                gain = self.acceptance.gain(some / requests, self._known(limit))
            limits.append(np.full(len(some), limit))
            nodes.append(some)
            gains.append(gain)
        return np.concatenate(limits), np.concatenate(nodes), np.concatenate(gains)

    def even_gain(self, limit: int) -> float:
        """Accepted tokens per request if every request verifies its own best ``limit`` nodes."""
        return self.acceptance.even_gain(self._known(limit))

    def work(self, limits: Any) -> Any:
        """Limits that determine the time of drafting: above `top_limit` it is the same."""
        return np.minimum(limits, self.top_limit)

    def _known(self, limit: int) -> int | None:
        """Convert a limit for `ExpectedAcceptance`."""
        return limit if limit < self.max_drafts else None
