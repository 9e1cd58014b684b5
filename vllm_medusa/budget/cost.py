"""The cost of a step, estimated while serving.

    ms = speed * (plain(rows) + trees(draft nodes) + heads(requests) * limits(max nodes drafted))

Each of the four is a curve through knots. A knot is a running estimate: the more observations it
has, the less a new one moves it, and old observations count less (a Kalman filter with a diagonal
covariance). A curve's value at a knot is the mean of this knot, its neighbors and the whole curve,
weighted by certainty and distance: a count that was slow once, or that has not run for long,
follows the others. ``speed`` follows all steps, since a whole machine gets faster and slower. It
returns to 1 within seconds: the knots of counts that run take over, and nothing accumulates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

# Variances of logarithms:
_NOISE = 0.07**2  # of a step's time
_UNSEEN = 1.0  # of a knot without observations
_NEAR = 0.1**2  # of the difference from a knot a quarter of an octave away
_FAR = 0.4**2  # of the difference from a curve's mean, if the knots seen do not differ more
_SURPRISED = 0.5**2  # of all knots after a change of the machine
_SPEED = 0.02**2  # of the machine's speed, per step
_DRIFT = 0.0005  # growth of a knot's variance per second, for parts as long as a plain row
_MAX_SHORTER = 5.0  # by this squared, it grows at most faster for shorter parts
_MIN_SLOPE = 0.05  # of a step's time on a knot of trees, heads or limits
_SPEED_SECONDS = 10.0  # in which the logarithm of the speed falls to 1 / e
_MAX_ERROR = 3.0  # standard deviations; clips a single step's error
_STREAK = 4  # consecutive clipped steps of one sign that mean a change of the machine
_MAX_LIMIT = 256  # draft nodes per request
_POWER = 0.5  # of the limit that the heads' time is assumed to grow with


class _Curve:
    """A positive quantity over a count, relative to the machine's speed."""

    def __init__(self, max_count: int, first: float) -> None:
        octaves = math.ceil(4 * math.log2(max(max_count, 2)))
        knots = np.unique(np.round(2.0 ** (np.arange(octaves + 1) / 4))).astype(np.float64)
        self.knots, self._list = knots, knots.tolist()
        self.prior = np.log(first * (1.0 + knots / 64.0))
        self.offset = np.zeros_like(knots)  # of the logarithm, from the prior
        self.variance = np.full_like(knots, _UNSEEN)
        self.seen = np.zeros(len(knots), np.bool_)
        apart = 4 * np.abs(np.log2(knots)[:, None] - np.log2(knots))
        self._between = _NEAR * (4.0**apart - 1) / 3  # variance of the difference of two knots
        self._values = np.exp(self.prior)
        self._is_stale = True  # whether `_values` are outdated

    @property
    def values(self) -> Floats:
        """[knots]: each with its neighbors."""
        if self._is_stale:
            self._values = np.exp(self.prior + self._smooth(slice(None)))
            self._is_stale = False
        return self._values

    def _smooth(self, knots: Any) -> Any:
        """``offset`` of some knots, each with its neighbors."""
        if not self.seen.any():
            return self.offset[knots]
        certain = self.seen / self.variance
        certain /= certain.sum()
        mean = certain @ self.offset
        far = 1 / (_FAR + certain @ (self.offset - mean) ** 2)
        near = self.seen / (self.variance + self._between[knots])
        return (near @ self.offset + far * mean) / (near.sum(-1) + far)

    def own(self, knot: int) -> float:
        """A knot's own estimate."""
        if not self.seen[knot]:
            return float(self.values[knot])
        return math.exp(self.prior[knot] + self.offset[knot])

    def own_at(self, count: int) -> float:
        """The interpolated estimate of the knots beside a count."""
        return sum(weight * self.own(knot) for knot, weight in self.beside(count))

    def beside(self, count: int) -> list[tuple[int, float]]:
        """The knots on both sides of a count, and their interpolation weights."""
        right = min(max(bisect_right(self._list, count), 1), len(self._list) - 1)
        low, high = self._list[right - 1], self._list[right]
        share = min(max((count - low) / (high - low), 0.0), 1.0)
        return [pair for pair in ((right - 1, 1.0 - share), (right, share)) if pair[1] > 0]

    def move(self, knot: int, by: float, variance: float) -> None:
        """Update the logarithm of a knot."""
        if not self.seen[knot]:
            self.offset[knot] = self._smooth(knot)
            self.seen[knot] = True
        self.offset[knot] += by
        self.variance[knot] = variance
        self._is_stale = True

    def scale(self, by: float) -> None:
        """Add to the logarithms of all knots."""
        self.prior += by
        self._is_stale = True

    def age(self, by: Floats) -> None:
        """Increase the variances [knots]: what was learned earlier counts less."""
        self.variance = np.minimum(self.variance + by, _UNSEEN)
        self._is_stale = True


def _known(slopes: list[tuple[_Curve, int, float]]) -> float:
    """Variance of a step's time; ``slopes``: d log(time) / d log(knot)."""
    return sum(slope**2 * float(curve.variance[knot]) for curve, knot, slope in slopes)


class StepCost:
    """Milliseconds of a step.

    A step has ``rows`` in total: one for each request, the others are draft nodes. ``limit`` is
    the max number of nodes that the heads drafted for each request at its end; 0: none ran.
    """

    def __init__(self, max_rows: int = 1024) -> None:
        self.max_rows = max_rows
        self.steps = 0  # observed
        self.surprises = 0  # number of changes of the machine that were detected
        self._plain, self._trees, self._heads, self._limits = self._curves = (
            _Curve(max_rows, 1.0),
            _Curve(max_rows, 0.05),
            _Curve(max_rows, 0.04),  # at a limit of 1
            _Curve(_MAX_LIMIT, 1.0),  # a factor
        )
        self._limits.prior = _POWER * np.log(self._limits.knots)
        self._log_speed = 0.0
        self._streak = 0  # consecutive outliers; negative: too fast
        self._seconds = 0.0  # since knot variances last grew

    def ms(self, rows: Any, requests: int, limit: Any) -> Any:
        """Expected time of a step, or of n steps with ``rows`` [n] and ``limit``, one or [n]."""
        rows = np.asarray(rows)
        found = self._at(self._plain, rows) * np.maximum(rows / self.max_rows, 1.0)
        drafting = np.where(np.greater(limit, 0), self._at(self._limits, limit), 0.0)
        found = found + drafting * self._at(self._heads, requests)
        return math.exp(self._log_speed) * found + self.trees_ms(rows - requests)

    def trees_ms(self, nodes: Any) -> Any:
        """Expected time that draft nodes, one number or [n], add to that of their rows."""
        found = np.where(nodes > 0, self._at(self._trees, nodes), 0.0)
        return math.exp(self._log_speed) * found

    def plain_ms(self, requests: int) -> float:
        """Expected time of a step without drafts and heads, by the nearest counts alone."""
        return self._plain.own_at(requests) * math.exp(self._log_speed)

    def observe(self, rows: int, requests: int, limit: int, ms: float) -> float | None:
        """Update from a step; return its expected milliseconds.

        None if it was not used: no requests, or no valid time.
        """
        if not (0 < ms < math.inf and 0 < requests <= rows):
            return None
        nodes = rows - requests
        parts = [(self._plain, rows, 1.0)]
        parts += [(self._trees, nodes, 1.0)] if nodes else []
        if limit > 0:
            heads, factor = self._heads.own_at(requests), self._limits.own_at(limit)
            parts.append((self._heads, requests, factor))
        slopes = [  # d time / d log(knot)
            (curve, knot, weight * factor * curve.own(knot))
            for curve, count, factor in parts
            for knot, weight in curve.beside(count)
        ]
        total = sum(slope for _, _, slope in slopes)
        if limit > 0:
            slopes += [
                (self._limits, knot, weight * heads * self._limits.own(knot))
                for knot, weight in self._limits.beside(limit)
            ]
        error = math.log(ms / total) - self._log_speed
        if self.steps == 0:
            for curve in (self._plain, self._trees, self._heads):
                curve.scale(error)
            error = 0.0
        expected = ms * math.exp(-error)
        self.steps += 1
        self._age(ms / 1e3)
        # without a minimum, a part that seems small would explain nothing, and never grow again
        slopes = [
            (curve, knot, slope / total if curve is self._plain else max(slope / total, _MIN_SLOPE))
            for curve, knot, slope in slopes
        ]
        known = _known(slopes)
        bound = _MAX_ERROR * math.sqrt(known + _NOISE)
        if abs(error) > bound and self._is_change(error):
            known, bound = _known(slopes), math.inf
        elif abs(error) <= bound:
            self._streak = 0
        error = min(max(error, -bound), bound)
        whole = known + _SPEED + _NOISE
        for curve, knot, slope in slopes:
            variance = float(curve.variance[knot])
            gain = slope * variance / whole
            curve.move(knot, gain * error, variance * (1.0 - gain * slope))
        self._log_speed += _SPEED / whole * error
        return expected

    def _is_change(self, error: float) -> bool:
        """Whether enough consecutive steps had errors of one sign; if so, reset all variances."""
        side = 1 if error > 0 else -1
        self._streak = max(self._streak * side, 0) * side + side
        if abs(self._streak) < _STREAK:
            return False
        self._streak = 0
        self.surprises += 1
        for curve in self._curves:
            curve.variance.fill(_SURPRISED)
        return True

    def _age(self, seconds: float) -> None:
        seconds = min(seconds, 1.0)
        self._log_speed *= 1.0 - seconds / _SPEED_SECONDS
        self._seconds += seconds
        if self._seconds > 1.0:
            row, heads = self._plain.values[0], self._heads.values[0]
            for curve in self._curves:
                ms = curve.values * (heads if curve is self._limits else 1.0)
                curve.age(_DRIFT * self._seconds * np.clip(row / ms, 1.0, _MAX_SHORTER) ** 2)
            self._seconds = 0.0

    @staticmethod
    def _at(curve: _Curve, counts: Any) -> Any:
        return np.interp(counts, curve.knots, curve.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without variances."""
        return {
            "max_rows": self.max_rows,
            "steps": self.steps,
            "log_curves": [
                (np.log(curve.values) + self._log_speed * (curve is not self._limits))
                .round(5)
                .tolist()
                for curve in self._curves
            ],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> StepCost:
        """Read the output of `to_dict` as a prior for the shapes of the curves.

        Raises:
            ValueError: Not a step-cost document.

        """
        try:
            cost = cls(int(document["max_rows"]))
            cost.steps = int(document["steps"])
            for curve, logs in zip(cost._curves, document["log_curves"], strict=True):
                curve.prior[:] = np.array(logs, np.float64).reshape(curve.prior.shape)
            numbers = np.concatenate([curve.prior for curve in cost._curves])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a step-cost document ({error!r})") from None
        if not (np.abs(numbers) < 50).all() or cost.steps < 1:
            raise ValueError(f"not a step-cost document ({cost.steps} steps)")
        return cost
