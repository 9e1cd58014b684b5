"""What a step costs, by rows, requests and what is in play: learned while serving.

The logarithm of a step's time is a sum of lines through knots: one over the rows of the step, one
over the rows of a request if there are drafts among them, one over the requests if heads run. All
heights are estimated together by a Kalman filter. Its prior says that neighbours are alike, that a
count may still be cheaper than the one below it, and that the machine as a whole gets faster and
slower far more than the shape of its curves changes; so a step of any size tells about all others.
What hasn't been seen for a while becomes uncertain again, at most as much as it was at first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

_DENSE = 64  # every number of rows up to here has a knot of its own, then eight an octave
_FORGET = 0.0025  # a second: of the way back to the first uncertainty
_SCALE = 2.0  # standard deviations of logarithms: of the machine's speed as a whole
_SHAPE, _SHAPE_OCTAVES = 0.5, 4.0  # of the line over rows, and how far its knots go together
_ROUGH = 0.05  # of one row count against its neighbours
_SURCHARGE, _SURCHARGE_OCTAVES = 0.4, 3.0  # of trees and of heads
_NOISE = (0.02, 0.3)  # bounds of the noise of a step
_OUTLIER = 3.0  # standard deviations; what is further away counts as if it were there
_STREAK = 3  # so many outliers to one side are no outliers: something changed


class StepCost:
    """Milliseconds of a step.

    A step has ``rows`` in all, at least one for each request; what is above are draft nodes.
    ``drafted`` says that heads ran at its end, which is for the drafts of the next step.
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
        sizes = [len(self._rows), len(self._per_request), len(self._requests)]
        self._starts = [0, *np.cumsum(sizes).tolist()]
        base, tree, heads = (slice(*self._starts[i : i + 2]) for i in range(3))
        self._mean = np.zeros(self._starts[-1])
        self._mean[base] = np.log1p(self._rows / _DENSE)
        self._mean[tree], self._mean[heads] = 0.05, 0.1
        prior = np.zeros((self._starts[-1],) * 2)
        octaves_apart = _apart(np.log2(self._rows))
        prior[base, base] = _SCALE**2 + _SHAPE**2 * np.exp(-octaves_apart / _SHAPE_OCTAVES)
        prior[base, base] += _ROUGH**2 * np.eye(len(self._rows))
        for part, knots in ((tree, self._per_request), (heads, self._requests)):
            prior[part, part] = _SURCHARGE**2 * np.exp(-_apart(knots) / _SURCHARGE_OCTAVES)
        self._prior = prior
        self._covariance = prior.copy()
        self._noise = 0.1**2
        self._streaks: dict[tuple[bool, bool], int] = {}
        self.steps = 0
        self.surprises = 0  # times that the machine was found changed all at once

    def observe(self, rows: int, requests: int, drafted: bool, ms: float) -> None:
        """Learn from a step; one without requests or time teaches nothing."""
        if not (0 < ms < math.inf and 0 < requests <= rows):
            return
        at = self.features(rows, requests, drafted)[0]
        usual = float(self._log_ms(rows, requests, drafted))
        error = math.log(ms) - usual
        if self.steps == 0:  # nothing is known of the machine's speed, whatever its curve is
            self._mean[: len(self._rows)] += error
            usual, error = math.log(ms), 0.0
        self.steps += 1
        seconds = min(math.exp(usual) / 1e3, 1.0)  # not an outlier's
        self._covariance += (_FORGET * seconds) * (self._prior - self._covariance)
        error = self._without_outliers(error, at, (rows > requests, drafted))
        reach = self._covariance @ at
        known = float(at @ reach)
        self._mean += reach * (error / (known + self._noise))
        self._covariance -= np.outer(reach, reach) / (known + self._noise)
        low, high = _NOISE
        self._noise += 0.02 * (error**2 - known - self._noise)
        self._noise = min(max(self._noise, low**2), high**2)

    def _without_outliers(self, error: float, at: Floats, kind: tuple[bool, bool]) -> float:
        """Bound the error, unless steps of the kind keep saying the same."""
        limit = _OUTLIER * math.sqrt(float(at @ self._covariance @ at) + self._noise)
        if abs(error) <= limit:
            self._streaks[kind] = 0
            return error
        side = 1 if error > 0 else -1
        streak = max(0, side * self._streaks.get(kind, 0)) + 1
        self._streaks[kind] = side * streak
        if streak < _STREAK:
            return side * limit
        self._streaks[kind] = 0
        self.surprises += 1
        self._covariance += self._prior
        return error

    def ms(self, rows: Any, requests: int, drafted: bool) -> Any:
        """Expected time of a step, or of steps with ``rows``, [n]."""
        return np.exp(self._log_ms(rows, requests, drafted))

    def _log_ms(self, rows: Any, requests: int, drafted: bool) -> Any:
        rows = np.asarray(rows, np.float64)
        base, tree, heads = np.split(self._mean, self._starts[1:3])
        found = np.interp(rows, self._rows, base)
        found = found + np.log(np.maximum(rows / self._rows[-1], 1.0))
        over = np.log2(np.maximum(rows / requests, 1.0))
        found += np.where(rows > requests, np.interp(over, self._per_request, tree), 0.0)
        if drafted:
            found += np.interp(math.log2(requests), self._requests, heads)
        return found

    def features(self, rows: Any, requests: int, drafted: bool) -> Floats:
        """How much each knot counts for steps with ``rows``: [n, knots]."""
        rows = np.atleast_1d(np.asarray(rows, np.float64))
        found = np.zeros((len(rows), len(self._mean)))
        over = np.log2(np.maximum(rows / requests, 1.0))
        _place(found, self._starts[0], self._rows, rows)
        _place(found, self._starts[1], self._per_request, over, rows > requests)
        if drafted:
            _place(found, self._starts[2], self._requests, np.full(len(rows), math.log2(requests)))
        return found

    def sizes(self, low: int, high: int) -> npt.NDArray[np.int64]:
        """Numbers of rows from ``low`` to ``high``: both, and all that have a knot."""
        knots = self._rows.astype(np.int64)
        between = knots[(knots > low) & (knots < high)]
        ends = [n for n in (low, high) if low <= high]
        return np.unique(np.concatenate([between, np.array(ends, np.int64)]))

    def doubt(self, these: Floats, those: Floats) -> Floats:
        """Standard deviation of the logarithm of ``these / those`` costs, both `features`."""
        apart = these - those
        return np.sqrt(np.maximum(((apart @ self._covariance) * apart).sum(1), 0.0))

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


def _place(
    found: Floats,
    start: int,
    knots: Floats,
    values: Floats,
    where: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Add each value's two shares in the knots beside it; beyond the ends, the end has all."""
    right = np.clip(np.searchsorted(knots, values), 1, len(knots) - 1)
    left = right - 1
    share = np.clip((values - knots[left]) / (knots[right] - knots[left]), 0.0, 1.0)
    some = np.flatnonzero(np.ones(len(values), bool) if where is None else where)
    found[some, start + left[some]] += 1.0 - share[some]
    found[some, start + right[some]] += share[some]
