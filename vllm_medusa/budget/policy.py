"""How many draft nodes a step verifies, for which requests, and how many the heads draft.

The heads run at the end of a step, so the max number of nodes to draft per request (the limit) is
decided one step before the number of drafts to verify. A limit of n nodes also limits the number
of heads that run to n, since the best n nodes are no deeper than n; with 0, no heads run.

`integration.scheduling.scheduler` calls `limit` before drafting and `counts` for the drafts
received. With asynchronous scheduling, where drafts are not seen, `limit` decides both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_medusa.budget.cost import StepCost
from vllm_medusa.budget.expected_acceptance import Drafted, ExpectedAcceptance
from vllm_medusa.budget.measured_speed import MeasuredSpeed
from vllm_medusa.budget.plan import Plan, Planner

START, STOP = 1.06, 1.02  # expected speed against plain steps at which drafting begins and ends
_PLAN_MS = 250.0  # how long a plan is reused, in step time
_TRIAL_STEPS = 3
_TRIAL_SHARE = 0.003  # share of time that trials may lose
_MAX_SAVED = 2.0  # max savings and max debt, in durations of `_TRIAL_STEPS` plain steps
_WAIT = 16  # steps between trials
_NEXT_SIZES = (1, 2, -1, 3)  # offsets from the best size to sizes to try
_LEARN_MS = 100.0  # min interval of updates, and of decisions while drafting is off
_LEARN_STEPS = 64  # steps after start-up or a change, all used for updates
_PROMPT_KEEP = 0.9  # decay of the time of a prompt's rows, per step with a prefill


class FixedBudget:
    """A fixed number of nodes for every request if there is room."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def limit(self, requests: int, room: int, full: float = 0.0) -> int:
        """The max number of drafts per request."""
        return self.max_drafts

    def counts(
        self, drafts: Sequence[Drafted], requests: int, room: int, *, prefill: bool = False
    ) -> list[int]:
        """How many of each request's drafts to verify: all, or the likeliest if room is short."""
        return best([draft.survival for draft in drafts], room)


class AutoBudget:
    """The number of nodes that maximizes throughput, from step costs and acceptance.

    Drafting begins when a clear gain is expected, and ends when none is expected or when measured
    speed is below that of plain steps. Drafts without heads, such as copies, also pause then.
    Occasionally a few steps try an alternative (heads while drafting is off; no nodes, or another
    number, while it is on). They may lose a small share of the time: the estimated loss of a trial
    is charged when it begins, and, while drafting is off, corrected by the loss of its steps.
    """

    def __init__(
        self,
        cost: StepCost,
        acceptance: ExpectedAcceptance,
        max_drafts: int,
        top_limit: int = 1,
        *,
        even: bool = False,
    ) -> None:
        """Create the policy.

        Args:
            cost: step costs.
            acceptance: acceptance of drafts.
            max_drafts: max draft nodes per request.
            top_limit: limit from which on drafting takes no more time: all heads run. 0: there
                are no heads, drafts are only copied.
            even: whether every request gets the limit, decided before drafting.

        """
        self.cost, self.acceptance = cost, acceptance
        self.max_drafts, self.even = max_drafts, even
        self.planner = Planner(cost, acceptance, max_drafts, top_limit, even=even)
        self.limits = self.planner.limits
        self.drafting = False
        self.trials = 0
        self.turn = 0  # counts trials, to try the alternatives in turn
        self._plan: Plan | None = None
        self._now = self._planned_at = 0.0  # ms of steps
        self._trial_left, self._trial = 0, (0, 0)  # steps; limit and nodes
        self._waited, self._saved = 0, math.nan  # steps since a trial; ms for trials, NaN: unset
        self._trial_loss = 0.0  # estimated, per step of the last trial; 0 if drafting was on
        self._idle = 0  # steps of requests without drafts
        self._surprises = cost.surprises
        self.speed, self.speed_of_copies = MeasuredSpeed(), MeasuredSpeed()
        self._last_limit = 0  # of the last step: whether heads drafted what this one verifies
        self._at_rest: tuple[int, int] | None = None  # requests and room of the decision
        self._learned_at, self._learned_plain = -math.inf, 0.0  # ms of steps; of a plain step
        self._learned_shape = (0, 0, 0)  # rows, requests and limit of the step last used for costs
        self._learned_steps = 0  # since start-up or a change of the machine
        self._drafts_at, self._drafts_learned = -math.inf, 0  # ms of steps; updates of acceptance
        self._prompts, self._prompt_ms = np.zeros(2), 0.0  # ms and rows of prompts; ms of a row
        self._table: tuple[Any, list[float]] = (None, [])  # step times by number of nodes

    @property
    def expected_ratio(self) -> float:
        """Speed with drafts relative to plain steps, by the last plan.

        While drafting pauses because steps proved slower, the measured one.
        """
        if self._now < self.speed.paused_until:
            return self.speed.failed_ratio
        return self._plan.ratio if self._plan else 1.0

    @property
    def _copies_pause(self) -> bool:
        return self._now < self.speed_of_copies.paused_until

    @property
    def forced_pay(self) -> bool:
        """Whether to search for drafts that need no heads, by the last plan."""
        return self._plan is not None and self._plan.forced_pay and not self._copies_pause

    def limit(self, requests: int, room: int, full: float = 0.0) -> int:
        """Max nodes to draft per request at the end of this step.

        Args:
            requests: expected to decode in the next step.
            room: rows for draft nodes in it.
            full: fraction of recent steps that prefills filled, so that no drafts were verified.

        """
        if requests < 1 or room < 1 or not self.limits:
            return 0
        if self._at_rest == (requests, room):
            self._idle += requests
            self._waited += 1
            return 0
        plan = self.plan(requests, room)
        if not plan.limit or self._now < self.speed.paused_until:
            return 0
        self._decide(plan, full)
        if not self.drafting:
            self._idle += requests
        if not self._trial_left:
            self._waited += 1
            changed = self._surprises != self.cost.surprises
            if changed:
                self._surprises, self.turn, self._saved = self.cost.surprises, 0, math.inf
            if changed or self._waited >= _WAIT:
                self._begin_trial(plan)
        if self._trial_left:
            self._trial_left -= 1
            return self._trial[0]
        if self.drafting:
            return plan.limit
        self._at_rest = requests, room
        return 0

    def counts(
        self, drafts: Sequence[Drafted], requests: int, room: int, *, prefill: bool = False
    ) -> list[int]:
        """How many of each request's drafts to verify: those whose gain exceeds their cost."""
        values = [self.acceptance.corrected(draft) for draft in drafts]
        gain = itertools.accumulate(sorted(itertools.chain.from_iterable(values), reverse=True))
        return best(values, self.total(list(gain), requests, room, prefill=prefill))

    def total(self, gain: list[float], requests: int, room: int, *, prefill: bool = False) -> int:
        """Total nodes to verify, from the gain [K] of the best 1, 2, .. of them.

        A node's value is its probability minus its time, priced at the rate of the best plan.
        Beside a prefill, which is compute-bound, a node takes as long as a row of a prompt.
        """
        gain = gain[: max(room, 0)]
        if requests < 1 or not gain:
            return 0
        if self._trial_left and self._trial[0]:
            return min(self._trial[1], len(gain))
        if self._copies_pause and not self.drafting:
            return 0
        plan = self.plan(requests, room)
        limit = self.planner.work(plan.limit) if self.drafting else 0
        rate = max(plan.rate if self.drafting else 0.0, plan.rate_without)
        version = self.cost.steps if self._learned_steps < _LEARN_STEPS else self._planned_at
        row_ms = self._prompt_ms if prefill else None
        key, times = (version, requests, limit, row_ms), self._table[1]
        if self._table[0] != key or len(times) <= len(gain):
            nodes = np.arange(1 + max(len(gain), min(plan.room, 2 * len(gain) + 16)))
            if prefill:
                times = (self.cost.trees_ms(nodes) + self._prompt_ms * nodes).tolist()
            else:
                times = self.cost.ms(requests + nodes, requests, limit).tolist()
            self._table = key, times
        worth = [value - rate * ms for value, ms in zip([0.0, *gain], times, strict=False)]
        return worth.index(max(worth))

    def pays_beside_prefill(self, limit: int, requests: int) -> bool:
        """Whether to verify every request's best ``limit`` nodes in a step with a prefill."""
        nodes = limit * requests
        gain = requests * self.planner.even_gain(limit)
        ms = float(self.cost.trees_ms(nodes)) + self._prompt_ms * nodes
        return gain > ms * self.plan(requests, nodes).rate

    def observe(
        self, rows: int, requests: int, limit: int, ms: float, tokens: float = 0.0
    ) -> float | None:
        """Record the time and tokens of a step; see `StepCost.observe`.

        Costs are updated only once per `_LEARN_MS`, unless the step differs from the last one that
        was used: fast steps must cost little more than without trees.
        """
        shape = rows, requests, limit
        expected = None
        if (
            shape != self._learned_shape
            or self._learned_steps < _LEARN_STEPS
            or not 0 < ms < _LEARN_MS
            or self._now - self._learned_at >= _LEARN_MS
        ):
            self._at_rest = None
            surprises = self.cost.surprises
            expected = self.cost.observe(rows, requests, int(self.planner.work(limit)), ms)
            same = surprises == self.cost.surprises
            self._learned_steps = 1 + self._learned_steps if same else 0
            if not self._learned_steps:
                self._drafts_learned = 0
            if not 0 < ms < 1e6 or requests < 1:
                return expected
            self._learned_at, self._learned_shape = self._now + ms, shape
            self._learned_plain = self.cost.plain_ms(requests)
        plain = self._learned_plain
        self._now += ms
        if math.isnan(self._saved):  # the first step
            self._saved = _MAX_SAVED * _TRIAL_STEPS * plain
        self._saved += _TRIAL_SHARE * min(ms, 2 * plain)
        copies = rows > requests and not self.drafting and not self._last_limit
        if tokens and self._trial_loss and (limit or (rows > requests and self._last_limit)):
            assert self._plan is not None
            charged = self._trial_loss if limit else 0.0  # its last step only verifies
            self._saved += charged - max(min(ms, 4 * plain) - tokens / self._plan.rate_without, 0.0)
        if tokens and not self._trial_left and (self.drafting or copies):
            speed = self.speed_of_copies if copies else self.speed
            speed.add(min(ms, 4 * plain), plain * tokens / requests)
            if copies:
                speed.failed(self._now)
        self._last_limit = limit
        return expected

    def observe_prefill(
        self, prompt_rows: int, nodes: int, requests: int, limit: int, ms: float
    ) -> None:
        """Record a step with a prefill of ``prompt_rows``, excluding one row for each request."""
        self._last_limit = limit
        if prompt_rows < 1 or not 0 < ms < 1e6:
            return
        if self.cost.steps:
            rest = self.cost.ms(requests + nodes, requests, self.planner.work(limit))
            ms = max(ms - float(rest), 0.0)
        self._prompts *= _PROMPT_KEEP
        self._prompts += ms, prompt_rows
        self._prompt_ms = float(self._prompts[0] / self._prompts[1])

    def observe_drafts(
        self, drafts: Sequence[Drafted], verified: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Record a step's accepted drafts, see `ExpectedAcceptance.observe`.

        After the first `_LEARN_STEPS` at most once per `_LEARN_MS`, to save time. Trials and copies
        are always recorded, as is the absence of copies (`ExpectedAcceptance.no_copies`).
        """
        if (
            self._trial_left
            or self._drafts_learned < _LEARN_STEPS
            or self._now - self._drafts_at >= _LEARN_MS
            or any(draft.copied is not None for draft in drafts)
        ):
            self._drafts_at, self._drafts_learned = self._now, self._drafts_learned + 1
            self.acceptance.observe(drafts, verified, accepted)

    def plan(self, requests: int, room: int) -> Plan:
        """Expected values for a batch; a recent plan for a similar batch is reused."""
        room = min(requests * self.max_drafts, room)
        plan = self._plan
        if (
            plan is None
            or self._now - self._planned_at > _PLAN_MS
            or 8 * abs(plan.requests - requests) > requests
            or (plan.room != room and min(plan.room, room) < requests)
        ):
            plan = self._plan = self.planner.plan(requests, room, copies=not self._copies_pause)
            self._planned_at = self._now
        return plan

    def _decide(self, plan: Plan, full: float) -> None:
        """Start or stop drafting."""
        gain = (1.0 - full) * (plan.ratio - 1.0) - full * (plan.heads - 1.0)
        if not self.drafting:
            if 1.0 + gain > START:
                self.drafting, self._trial_loss = True, 0.0
                self.speed.restart()
        elif self.speed.failed(self._now) or 1.0 + gain <= STOP:
            self.drafting = False

    def _begin_trial(self, plan: Plan) -> None:
        """Try an alternative for a few steps, if its expected cost has been saved up."""
        maximum = _MAX_SAVED * _TRIAL_STEPS * float(plan.arms[0, 3])
        self._saved = min(max(self._saved, -maximum), maximum)
        limit, nodes, rate, ms, most = self._alternative(plan)
        best_rate = max(plan.rate if self.drafting else 0.0, plan.rate_without)
        lost = _TRIAL_STEPS * ms * max(1.0 - rate / best_rate, 0.02)
        lost = min(lost, most * maximum)
        self.turn += 1
        if not lost <= self._saved:  # also before the first step
            return
        self._saved -= lost
        self._trial_loss = 0.0 if self.drafting else lost / _TRIAL_STEPS
        self.trials += 1
        self._waited = 0
        self._trial_left, self._trial = _TRIAL_STEPS, (int(limit), int(nodes))
        self.acceptance.forget(self._idle)
        self._idle = 0

    def _alternative(self, plan: Plan) -> tuple[float, ...]:
        """A row of `Plan.arms`, and the max charge for trying it, as a share of the max savings.

        While drafting, every other time no drafts, else a limit or a number of nodes. Plain steps
        are tried that often because drafting is compared with them: if only steps with drafts
        become slower, this looks like a slower machine until a plain step has run. Numbers next to
        the best one are tried at any limit, since its own limit may be too low for them; distant
        ones say little about it. Charges are bounded where the estimate may be wrong, but not by
        much.
        """
        turn = self.turn
        if self.drafting:
            if turn % 2 == 0:
                return (*plan.arms[0], math.inf)
            turn //= 2
        if self.drafting and turn % 2 == 0 and not self.even:
            by_rate = plan.arms[plan.arms[:, 2].argsort()]
            best = {row[1]: row for row in by_rate if row[0] > 0}  # of each number of nodes
            sizes = sorted(best)
            place = sizes.index(max(best, key=lambda nodes: best[nodes][2]))
            place += _NEXT_SIZES[turn // 2 % len(_NEXT_SIZES)]
            return (*best[sizes[min(max(place, 0), len(sizes) - 1)]], 0.25)
        limit = self.limits[turn // 2 % len(self.limits)]
        arms = plan.arms[plan.arms[:, 0] == limit]
        if not len(arms):  # no room
            return (*plan.arms[0], math.inf)
        return (*arms[arms[:, 2].argmax()], 0.5 if limit == self.limits[0] else math.inf)


def best(survival: Sequence[Sequence[float]], total: int) -> list[int]:
    """Number of drafts each request keeps if the best ``total`` of all are kept.

    ``survival`` are the values of each request's drafts. Ties go to the first request.
    """
    kept = [len(own) for own in survival]
    if total >= sum(kept):
        return kept
    nodes = [(-value, owner) for owner, own in enumerate(survival) for value in own]
    kept = [0] * len(survival)
    for _, owner in sorted(nodes)[: max(total, 0)]:
        kept[owner] += 1
    return kept
