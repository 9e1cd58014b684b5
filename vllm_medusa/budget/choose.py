"""How many draft nodes a step verifies, and how many of the heads run at its end.

A node is worth its survival less its time, and time is worth what the best choice makes of it in
the long run. That heads have run is no reason to verify what they drafted.

The best n nodes of a request lie no deeper than n. So where few nodes pay, few heads run: a limit
of nodes a request, said before there are drafts, is a limit of heads too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_medusa.budget.cost import Floats, StepCost
from vllm_medusa.budget.outlook import LIMITS, Outlook
from vllm_medusa.budget.surcharge import Surcharge
from vllm_medusa.budget.tries import Tries

_FRESH = 50.0  # ms of steps for which a forecast holds: thinking takes its time from the model
_OFTEN, _AGAIN = 16, 100.0  # times that a kind of step is learned from, then once in so many ms
_KINDS = 4096  # of steps that are told apart
_KEEP = 0.005  # of a step's time by which another number of nodes has to be better
START, _STOP = 1.015, 1.0  # drafts against plain steps: where drafting starts, and where it ends
_COPYING = 1.5  # copied drafts against plain steps, where looking for them takes time
_UNSEEN = 0.2  # of a gain that may come from nodes beyond the limit, whatever is known of them
_CAUTION = 0.5  # standard deviations that the first drafts' steps may be dearer than known


@dataclass(frozen=True)
class Forecast:
    """What is expected of a batch.

    Attributes:
        requests: of the batch.
        sizes: [n] numbers of draft nodes, from 1; empty if none can be verified.
        limits: [n] nodes that are drafted for a request at most.
        gain: [n] extra tokens of a step with them.
        rates: [n] tokens a millisecond with them.
        plain: tokens a millisecond without heads: plain steps, or such as verify what was copied.
        unused: share of steps before which heads ran, and no draft could be verified.
        heads: time of a step in which as many heads run as the best needs, against one without.
        copying: ``plain`` is that of steps that verify what was copied.

    """

    requests: int
    sizes: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    gain: Floats
    rates: Floats
    plain: float
    unused: float = 0.0
    heads: float = 1.0
    copying: bool = False

    @property
    def nodes(self) -> int:
        """The best number of draft nodes, from 1."""
        return int(self.sizes[self.rates.argmax()])

    @property
    def limit(self) -> int:
        """Nodes that are then drafted for a request at most."""
        return int(self.limits[self.rates.argmax()])

    @property
    def ratio(self) -> float:
        """Speed with drafts against plain steps; where drafts stay unused, heads run in vain."""
        gain = float(self.rates.max()) / self.plain - 1.0
        return 1.0 + (1.0 - self.unused) * gain - self.unused * max(0.0, self.heads - 1.0)

    @property
    def best_rate(self) -> float:
        """Tokens a millisecond of the better one."""
        return self.plain * max(1.0, self.ratio) if len(self.rates) else self.plain


class NodeBudget:
    """Decides, once for all ranks: each step asks `choose`, then `draft_next`, then `observe`."""

    def __init__(
        self, cost: StepCost, outlook: Outlook, max_per_request: int, num_heads: int = 1
    ) -> None:
        """Decide by these two.

        Args:
            cost: learns from `observe`.
            outlook: learns from whoever sees drafts and what became of them.
            max_per_request: the most draft nodes that a request can have.
            num_heads: that can run; 0: drafts can only be copied.

        """
        self.cost, self.outlook = cost, outlook
        self.max_per_request, self.num_heads = max_per_request, num_heads
        self.limits: list[int] = [n for n in LIMITS if n < min(num_heads, max_per_request)]
        self.limits += [max_per_request] if num_heads else []
        self.drafting = False  # whether drafts pay, as of the last forecast
        self.expected_ratio = 1.0  # speed with drafts against plain steps, by that forecast
        self.tries = Tries()
        self.surcharge = Surcharge()
        self._surprises = 0
        self._heads = 0.0  # share of the heads that runs while drafts pay
        self._wanted: int | None = None  # nodes of a try, for the next step that has drafts
        self._rests = False  # a try of nothing goes on: in its second step no head runs either
        self._last = (0, 0)  # requests and nodes of the last choice
        self._now = 0.0  # ms of all steps
        self._known: tuple[tuple[int, int, int], Forecast] | None = None
        self._known_at = 0.0
        # rows, requests and heads of a step -> how often it was learned from, when last, its ms
        self._learned: dict[tuple[int, int, float], tuple[int, float, float]] = {}

    def choose(self, gain: npt.ArrayLike, requests: int, free_rows: int) -> int:
        """Draft nodes to verify in all; 0: none.

        Args:
            gain: [K + 1] expected extra tokens with the n best drafts of the batch, concave, as
                from `Outlook.gain_of`; K is 0 if there are no drafts.
            requests: that decode in this step.
            free_rows: the most nodes that there is room for.

        """
        gain = np.asarray(gain, np.float64)[: max(free_rows, 0) + 1]
        if requests < 1 or len(gain) < 2:
            return 0
        wanted, self._wanted = self._wanted, None
        if wanted:
            return min(wanted, len(gain) - 1)
        heads = self._heads if self.drafting else 0.0
        nodes = np.arange(len(gain))
        ms = self.cost.ms(requests + nodes, requests, heads) + self.surcharge.node * nodes
        price = self._best_rate(requests, free_rows) * ms
        worth = gain - price
        best = int(worth.argmax())
        before, last = self._last
        if before == requests and last < len(gain):
            best = last if worth[last] >= worth[best] - _KEEP * price[best] else best
        self._last = (requests, best)
        return best

    def draft_next(self, requests: int, free_rows: int, unused: float = 0.0) -> int:
        """Nodes to draft for a request at most at the end of this step; 0: no head runs.

        Args:
            requests: that are expected to decode in the next step.
            free_rows: the most draft nodes that there will be room for.
            unused: how often, of late, a step verified no drafts although it could have had some.

        """
        if requests < 1:
            return 0
        forecast = replace(self.forecast(requests, free_rows), unused=unused)
        if len(forecast.sizes) == 0:
            return 0
        self.expected_ratio = forecast.ratio
        before, self.drafting = self.drafting, self._pays(forecast)
        if not self.drafting:
            self.outlook.idle(requests)
        limit = forecast.limit if self.drafting else 0
        self._heads = self.share_of(limit)
        changed = before != self.drafting or self._surprises != self.cost.surprises
        self._surprises = self.cost.surprises
        self.tries.step(requests, changed, forecast.ratio)
        if self._rests:
            self._rests = False
            return 0
        return self._try(forecast, limit) if self.tries.due else limit

    def expect(self, kinds: Sequence[int]) -> None:
        """Say which kinds of requests the next step has; see `Outlook`."""
        self.outlook.expect(kinds)
        self._known = None

    def share_of(self, limits: Any) -> Any:
        """Share of the heads that run for so many nodes a request, 0 to 1."""
        return np.minimum(limits, self.num_heads) / max(self.num_heads, 1)

    def ms(self, rows: Any, requests: int, heads: Any) -> Any:
        """Expected time of a step, or of [n], with what it takes beside."""
        return self.cost.ms(rows, requests, heads) + self.surcharge.ms(rows, requests, heads)

    @property
    def copying(self) -> bool:
        """Whether drafts that no head is needed for pay, as of the last forecast."""
        return self._known is not None and self._known[1].copying

    def observe(self, rows: int, requests: int, heads: float, ms: float) -> None:
        """Learn what a step took; see `StepCost.observe`."""
        step = rows, requests, heads
        times, last, usual = self._learned.get(step, (0, 0.0, 0.0))
        usual = usual or self.cost.ms(*step)
        self._now += ms if 0 < ms < math.inf else usual
        if times < _OFTEN or self._now - last >= _AGAIN:
            if len(self._learned) > _KINDS:
                self._learned.clear()
            surprises = self.cost.surprises
            self.cost.observe(*step, ms)
            usual = self.cost.ms(*step)
            self._learned[step] = times + 1, self._now, usual
            if surprises != self.cost.surprises:
                self._learned.clear()
        self.tries.earn(usual)

    def forecast(self, requests: int, free_rows: int) -> Forecast:
        """What drafts would bring to a batch of ``requests``, at least one."""
        most = min(requests * self.max_per_request, max(free_rows, 0))
        key = (requests, most, self.cost.surprises)
        if self._known and self._known[0] == key and self._now - self._known_at < _FRESH:
            return self._known[1]
        sizes = self.cost.sizes(requests + 1, requests + most) - requests
        alone = self.ms(requests, requests, 0.0)
        plain, copying = self._without_heads(requests, sizes, requests / alone)
        sizes, limits, gain = self._choices(requests, sizes)
        heads = self.share_of(limits)
        rates = (requests + gain) / self.ms(requests + sizes, requests, heads)
        dearer = 1.0
        if len(rates):
            dearer = self.ms(requests, requests, heads[rates.argmax()]) / alone
        forecast = Forecast(requests, sizes, limits, gain, rates, plain, heads=dearer)
        self._known = key, replace(forecast, copying=copying)
        self._known_at = self._now
        return self._known[1]

    def _without_heads(
        self, requests: int, sizes: npt.NDArray[np.int64], plain: float
    ) -> tuple[float, bool]:
        """Tokens a millisecond at best if no head runs, and whether copied drafts are verified."""
        if not self.outlook.copies or not len(sizes):
            return plain, False
        tokens = requests + self.outlook.gain(requests, sizes, 0)
        best = float((tokens / self.ms(requests + sizes, requests, 0.0)).max())
        return max(plain, best), best > _COPYING * plain

    def _best_rate(self, requests: int, free_rows: int) -> float:
        """Of the latest forecast, which may be a step old."""
        most = min(requests * self.max_per_request, max(free_rows, 0))
        if self._known and self._known[0][:2] == (requests, most):
            return self._known[1].best_rate
        return self.forecast(requests, free_rows).best_rate

    def _choices(
        self, requests: int, sizes: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
        """Numbers of nodes, limits of a request's that allow them, and what they would bring."""
        if not self.limits:
            return sizes[:0], sizes[:0], np.zeros(0)
        more = requests * self.max_per_request if self.outlook.copies else 0
        within = [sizes[sizes <= max(requests * limit, more)] for limit in self.limits]
        limits = np.repeat(self.limits, [len(some) for some in within])
        pairs = zip(within, self.limits, strict=True)
        gain = [self.outlook.gain(requests, some, limit) for some, limit in pairs]
        return np.concatenate(within), limits, np.concatenate(gain)

    def _pays(self, forecast: Forecast) -> bool:
        """Whether drafts pay; to begin with them, what is known has to be worth something."""
        if self.drafting or forecast.ratio <= START:
            return self.drafting and forecast.ratio > _STOP
        requests, heads = forecast.requests, self.share_of(forecast.limit)
        rows = requests + forecast.nodes
        both = self.cost.features([(requests, requests, 0.0), (rows, requests, heads)])
        doubt = float(self.cost.doubt(both, both[0])[1])
        return forecast.ratio > START * math.exp(_CAUTION * doubt)

    def _try(self, forecast: Forecast, limit: int) -> int:
        """The limit of a step that may try something else than ``limit``."""
        requests, rate = forecast.requests, forecast.best_rate
        sizes, limits = (  # 0: neither heads nor drafts
            np.concatenate([[0], each]) for each in (forecast.sizes, forecast.limits)
        )
        heads = self.share_of(limits)
        rates = np.concatenate([[forecast.plain], forecast.rates])
        tokens = requests + np.concatenate([[0.0], forecast.gain])
        steps = zip((requests + sizes).tolist(), itertools.repeat(requests), heads.tolist())
        features = self.cost.features(steps)
        now = 1 + int(forecast.rates.argmax()) if self.drafting else 0
        doubts = self.cost.doubt(features, features[now])
        doubts = np.hypot(doubts, self._doubts_of_gain(forecast, limit))
        if self.drafting:  # other sizes and none at all, in turn
            doubts = np.where((sizes > 0) == (self.tries.turn % 2 == 1), doubts, 0.0)
        doubts[now] = 0.0
        lost = self.ms(requests + sizes, requests, heads) - tokens / rate
        if not self.drafting:  # heads run in a step before it
            lost += self.ms(np.full_like(sizes, requests), requests, heads) - requests / rate
        tried = self.tries.pick(rates / rate, doubts, lost)
        if tried is None:
            return limit
        self._wanted = int(sizes[tried]) or None
        self._rests = tried == 0
        return int(limits[tried])

    def _doubts_of_gain(self, forecast: Forecast, limit: int) -> Floats:
        """[1 + n] standard deviations, of nothing and of each choice, against what goes on now."""
        outlook, requests, limits = self.outlook, forecast.requests, forecast.limits
        by_limit = {each: outlook.doubt(each) for each in set(limits.tolist())}
        doubts = np.array([by_limit[each] for each in limits.tolist()])
        if not limit:
            return np.concatenate([[0.0], doubts])
        seen = outlook.gain(requests, np.minimum(forecast.sizes, requests * limit), limit)
        unseen = np.maximum(forecast.gain - seen, _UNSEEN * forecast.gain)
        doubts *= np.where(limits > limit, unseen / (requests + forecast.gain), 0.0)
        return np.concatenate([[by_limit.get(limit, 0.0)], doubts])
