"""What a step costs, by rows, requests and what is in play: learned while serving.

The logarithm of a step's time is a sum of lines through knots: one over the rows of the step, one
over the rows of a request if there are drafts among them, two over the requests if heads run: for
drafting at all, and for as many of the heads as run; what heads take is a share of the step without
drafts, so it weighs less in longer steps. All heights are estimated together by a Kalman
filter. Its prior says that neighbours are alike, that a count may still be cheaper than the one
below it, and that the machine as a whole gets faster and slower far more than the shape of its
curves changes; so a step of any size tells about all others. What hasn't been seen for a while
becomes uncertain again, at most as much as it was at first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

_DENSE = 64  # every number of rows up to here has a knot of its own, then eight an octave
_FORGET = 0.0025  # a second: of the way back to the first uncertainty
_AGED_BY = 8  # steps at a time
_SCALE = 2.0  # standard deviations of logarithms: of the machine's speed as a whole
_SHAPE, _SHAPE_OCTAVES = 0.5, 4.0  # of the line over rows, and how far its knots go together
_ROUGH = 0.03  # of one row count against its neighbours
_SURCHARGE, _SURCHARGE_OCTAVES = 0.4, 3.0  # of trees, of drafting and of heads
_BY_HEADS, _SURCHARGE_PARTS = 0.7, 0.06  # share of the latter that grows with heads; of each alone
_NOISE = (0.02, 0.3)  # bounds of the noise of a step
_OUTLIER = 3.0  # standard deviations; what is further away counts little
_STREAK = 2  # but so many steps of a kind that are too slow, or too fast, are no outliers
_SHAKEN = 0.2  # how much of the first uncertainty comes back then
_WRONG = 4.0  # against the first uncertainty, of what may be wrong


@dataclass(frozen=True)
class Features:
    """What the costs of n steps are sums of.

    Attributes:
        places: [n, 8] knots.
        weights: [n, 8] how much each counts.

    """

    places: npt.NDArray[np.int64]
    weights: Floats

    def __getitem__(self, index: int) -> Features:
        """One step's, n = 1."""
        return Features(self.places[index][None], self.weights[index][None])


class StepCost:
    """Milliseconds of a step.

    A step has ``rows`` in all, at least one for each request; what is above are draft nodes.
    ``heads`` is the share of the heads that ran at its end, for the drafts of the next step.
    """

    def __init__(self, max_rows: int = 1024) -> None:
        """Know nothing but that more rows cost a little more.

        Args:
            max_rows: the most rows that a step may have; beyond, cost grows with rows.

        """
        dense = np.arange(1, min(_DENSE, max(2, max_rows)) + 1)
        octaves = math.log2(max(max_rows, _DENSE) / _DENSE)
        sparse = _DENSE * 2.0 ** (np.arange(1, math.ceil(8 * octaves) + 1) / 8)
        self.max_rows = max_rows
        self._rows = np.concatenate([dense, np.round(sparse)]).astype(np.float64)
        self._per_request = np.arange(0.0, 7.0)  # log2 of the rows of a request
        self._requests = np.arange(0.0, 10.0)  # log2
        self._knots = lines = (self._rows, self._per_request, self._requests, self._requests)
        self._lists = [knots.tolist() for knots in lines]
        self._starts = [0, *np.cumsum([len(knots) for knots in lines]).tolist()]
        base, tree, drafting, heads = (slice(*self._starts[i : i + 2]) for i in range(4))
        self._mean = np.zeros(self._starts[-1])
        self._mean[base] = np.log1p(self._rows / _DENSE)
        self._mean[tree], self._mean[drafting], self._mean[heads] = 0.05, 0.03, 0.07
        prior = np.zeros((self._starts[-1],) * 2)
        octaves_apart = _apart(np.log2(self._rows))
        prior[base, base] = _SCALE**2 + _SHAPE**2 * np.exp(-octaves_apart / _SHAPE_OCTAVES)
        prior[base, base] += _ROUGH**2 * np.eye(len(self._rows))
        near = _SURCHARGE**2 * np.exp(-_apart(self._per_request) / _SURCHARGE_OCTAVES)
        prior[tree, tree] = near
        near = np.exp(-_apart(self._requests) / _SURCHARGE_OCTAVES)
        parts = ((drafting, 1.0 - _BY_HEADS), (heads, _BY_HEADS))
        for (one, this), (other, that) in itertools.product(parts, parts):
            own = _SURCHARGE_PARTS**2 if one == other else 0.0
            prior[one, other] = (_SURCHARGE**2 * (this * that) + own) * near
        self._prior = prior
        self._covariance = prior.copy()
        self._noise = 0.1**2
        self._age = 0.0  # seconds since it grew doubtful
        self._streaks: dict[tuple[bool, bool], int] = {}  # outliers of a kind to one side
        self._last = 0  # side of the last step if it was one
        self.steps = 0
        self.surprises = 0  # times that the machine was found changed all at once

    def observe(self, rows: int, requests: int, heads: float, ms: float) -> None:
        """Learn from a step; one without requests or time teaches nothing."""
        if not (0 < ms < math.inf and 0 < requests <= rows):
            return
        places, shares = self._shares(rows, requests, heads)
        usual = float(self._mean[places] @ shares)
        error = math.log(ms) - usual
        if self.steps == 0:  # nothing is known of the machine's speed, whatever its curve is
            self._mean[: len(self._rows)] += error
            usual, error = math.log(ms), 0.0
        self.steps += 1
        self._age += min(math.exp(usual) / 1e3, 1.0)  # not an outlier's
        if self.steps % _AGED_BY == 0:
            self._covariance += (_FORGET * self._age) * (self._prior - self._covariance)
            self._age = 0.0
        reach = self._covariance[:, places] @ shares
        known = float(reach[places] @ shares)
        kind, noise = (rows > requests, heads > 0), self._noise
        if abs(error) <= _OUTLIER * math.sqrt(known + self._noise):
            self._streaks.pop(kind, None)
            self._last = 0
        elif self._is_change(kind, 1 if error > 0 else -1, error**2):
            reach = self._covariance[:, places] @ shares
            known = float(reach[places] @ shares)
        else:
            if known > noise:  # what is off isn't noise, so the doubt stays
                noise = (error / _OUTLIER) ** 2 - known
            error = math.copysign(_OUTLIER * math.sqrt(noise), error)
        self._mean += reach * (error / (known + noise))
        reach /= math.sqrt(known + noise)
        self._covariance -= np.multiply.outer(reach, reach)
        if known < self._noise:  # else what is off isn't noise
            low, high = _NOISE
            self._noise += 0.02 * (error**2 - known - self._noise)
            self._noise = min(max(self._noise, low**2), high**2)

    def doubt_all(self) -> None:
        """Be less sure than at first of all that is known: it may be wrong."""
        self._covariance = _WRONG * self._prior

    def _is_change(self, kind: tuple[bool, bool], side: int, size: float) -> bool:
        """Whether an outlier is none, because others said the same; if so, grow doubtful."""
        before = self._streaks.pop(kind, 0) * side
        self._streaks[kind] = side * (max(before, 0) + 1)
        again, self._last = self._last == side, side
        if again:  # two steps in a row, whatever they did: the whole machine
            base = len(self._rows)
            self._covariance[:base, :base] += size
            self._covariance += _SHAKEN * min(size, 1.0) * self._prior
        elif abs(self._streaks[kind]) >= _STREAK:  # steps of a kind, with others in between
            self._covariance += _SHAKEN * self._prior
        else:
            return False
        self._streaks.clear()
        self.surprises += 1
        return True

    def ms(self, rows: Any, requests: int, heads: Any) -> Any:
        """Expected time of a step, or of steps with ``rows`` [n] and ``heads``, one or [n]."""
        if isinstance(rows, int):
            places, shares = self._shares(rows, requests, heads)
            return math.exp(float(self._mean[places] @ shares)) * max(rows / self._rows[-1], 1.0)
        rows = np.asarray(rows, np.float64)
        base, tree = np.split(self._mean, self._starts[1:3])[:2]
        found = np.interp(rows, self._rows, base)
        over = np.log2(np.maximum(rows / requests, 1.0))
        found += np.where(rows > requests, np.interp(over, self._per_request, tree), 0.0)
        if np.any(heads):
            places, shares = self._shares(requests, requests, 1.0)
            once = float(self._mean[places[2:4]] @ shares[2:4])  # of drafting at all
            all_heads = float(self._mean[places[4:]] @ shares[4:])
            dearer = np.where(np.greater(heads, 0), once + all_heads * np.asarray(heads), 0.0)
            found += dearer * np.exp(np.minimum(self._plain(requests) - found, 0.0))
        return np.exp(found) * np.maximum(rows / self._rows[-1], 1.0)

    def _shares(self, rows: int, requests: int, heads: float) -> tuple[list[int], Floats]:
        """Which knots count for a step, and how much."""
        values = [(0, float(rows), 1.0)]
        if rows > requests:
            values.append((1, math.log2(rows / requests), 1.0))
        places, shares = self._between(values)
        if heads > 0:
            longer = float(self._mean[places] @ shares) - self._plain(requests)
            part, load = math.exp(min(-longer, 0.0)), math.log2(requests)
            more = self._between([(2, load, part), (3, load, part * float(heads))])
            return places + more[0], np.concatenate([shares, more[1]])
        return places, shares

    def _plain(self, requests: Any) -> Any:
        """Logarithm of the time of steps of so many rows, neither drafts nor heads."""
        return np.interp(requests, self._rows, self._mean[: len(self._rows)])

    def _between(self, values: Sequence[tuple[int, float, float]]) -> tuple[list[int], Floats]:
        """Knots of each line beside a value, and how much of a weight they have."""
        places, shares = [], []
        for line, value, weight in values:
            start, knots = self._starts[line], self._lists[line]
            right = min(max(bisect_left(knots, value), 1), len(knots) - 1)
            share = (value - knots[right - 1]) / (knots[right] - knots[right - 1])
            share = min(max(share, 0.0), 1.0)
            places += [start + right - 1, start + right]
            shares += [weight * (1.0 - share), weight * share]
        return places, np.array(shares)

    def features(self, steps: Iterable[tuple[int, int, float]]) -> Features:
        """Which knots count for each step of rows, requests and heads, and how much."""
        rows, requests, heads = np.array(list(steps), np.float64).reshape(-1, 3).T
        over, load = np.log2(rows / requests), np.log2(requests)
        places, weights = np.empty((len(rows), 8), np.int64), np.empty((len(rows), 8))
        for line, values, counts in (
            (0, rows, np.ones_like(rows)),
            (1, over, over > 0),
            (2, load, heads > 0),
            (3, load, heads),
        ):
            start, knots = self._starts[line], self._knots[line]
            right = np.searchsorted(knots, values).clip(1, len(knots) - 1)
            share = ((values - knots[right - 1]) / (knots[right] - knots[right - 1])).clip(0.0, 1.0)
            left = 2 * line
            places[:, left], places[:, left + 1] = start + right - 1, start + right
            weights[:, left], weights[:, left + 1] = counts * (1.0 - share), counts * share
        longer = (weights[:, :4] * self._mean[places[:, :4]]).sum(1) - self._plain(requests)
        weights[:, 4:] *= np.exp(np.minimum(-longer, 0.0))[:, None]
        return Features(places, weights)

    def sizes(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Numbers of rows from ``low`` to ``high``: both, and all that have a knot."""
        knots = self._rows.astype(np.int64)
        between = knots[(knots > low) & (knots < high)]
        ends = [low, high][: max(0, min(1 + high - low, 2))]
        return np.concatenate([ends[:1], between, ends[1:]]).astype(np.int64)

    def doubt(self, these: Features, those: Features) -> Floats:
        """Standard deviation of the logarithm of ``these / those`` costs: [n].

        A product of whole matrices would start numpy's own threads, beside those of the model.

        Args:
            these: of n steps.
            those: of as many, or of one.

        """
        places, weights = (
            np.concatenate(np.broadcast_arrays(one, other), 1)
            for one, other in ((these.places, those.places), (these.weights, -those.weights))
        )
        together = self._covariance[places[:, :, None], places[:, None, :]]
        variance = (together * weights[:, :, None] * weights[:, None, :]).sum((1, 2))
        return np.sqrt(np.maximum(variance, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is lost is how sure they are."""
        return {
            "max_rows": self.max_rows,
            "steps": self.steps,
            "noise": math.sqrt(self._noise),
            "log_ms": [round(float(value), 5) for value in self._mean],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> StepCost:
        """Take up what `to_dict` gave; it is believed less than when it was put down.

        Raises:
            ValueError: it is nothing of the kind.

        """
        try:
            cost = cls(int(document["max_rows"]))
            mean = np.array(document["log_ms"], np.float64)
            steps, noise = int(document["steps"]), float(document["noise"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"these are no step costs ({error!r})") from None
        if mean.shape != cost._mean.shape or not (np.abs(mean) < 50).all():
            raise ValueError(f"these are no step costs ({mean.shape} values)")
        if not steps > 0 or not _NOISE[0] <= noise <= _NOISE[1]:
            raise ValueError(f"these are no step costs ({steps} steps, noise {noise})")
        cost._mean, cost.steps, cost._noise = mean, steps, noise**2
        rows = len(cost._rows)
        cost._covariance = cost._prior * 0.5**2  # a table half as doubtful as none, but for
        cost._covariance[:rows, :rows] += _SCALE**2  # how fast the machine is today
        return cost


def _apart(knots: Floats) -> Floats:
    return np.abs(knots[:, None] - knots[None, :])
