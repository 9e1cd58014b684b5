"""The cost of a step, estimated while serving.

    ms = speed * (plain(rows) + trees(draft nodes) + share of the heads * heads(requests))

Each of the three is a curve through knots, estimated by one Kalman filter. Errors of knots are
correlated, more so if they are near: counts that were never or rarely run follow their neighbors,
and a slow step among few does not make a count look expensive for good. Old observations count
less. ``speed`` follows all steps, since a whole machine gets faster and slower.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

# Variances of logarithms:
_NOISE = 0.07**2  # of a step's time
_LEVEL = 1.0  # of a whole curve without observations
_LOCAL = 0.25**2  # of a knot, given the curve
_SURPRISED = 0.5**2  # of a knot after a change of the machine
_SPEED = 0.02**2  # of the machine's speed, per step
_DRIFT = 0.0005  # share of the covariance that returns per second
_OCTAVES, _CHANGED_OCTAVES = 2.0, 0.5  # distances at which correlations fall to 1 / e
_MAX_ERROR = 3.0  # standard deviations; clips a single step's error
_STREAK = 4  # consecutive clipped steps of one sign that mean a change of the machine
_FIRST_HEAD = 0.3  # share of the heads' time that is fixed
_FIRST = (1.0, 0.05, 0.1)  # the curves' assumed proportions
_PLAIN, _TREES, _HEADS = range(3)


class StepCost:
    """Milliseconds of a step.

    A step has ``rows`` in total: one for each request, the others are draft nodes. ``heads``
    is the share of the heads that ran at its end, for the drafts of the next step.
    """

    def __init__(self, max_rows: int = 1024) -> None:
        self.max_rows = max_rows
        self.steps = 0  # observed
        self.surprises = 0  # changes of the machine detected
        octaves = math.ceil(4 * math.log2(max(max_rows, 2)))
        knots = np.unique(np.round(2.0 ** (np.arange(octaves + 1) / 4))).astype(np.float64)
        self._knots, self._list = knots, knots.tolist()
        self._logs = np.log(np.outer(_FIRST, 1.0 + knots / 64.0)).ravel()  # [curves * knots]
        self._values = np.exp(self._logs)
        apart = np.abs(np.log2(knots)[:, None] - np.log2(knots))
        each = np.eye(len(_FIRST))
        # covariances of ``_logs``
        self._unseen = np.kron(each, _LEVEL + _LOCAL * np.exp(-apart / _OCTAVES))
        self._changed = np.kron(each, _SURPRISED * np.exp(-apart / _CHANGED_OCTAVES))
        self._covariance = self._unseen.copy()
        self._log_speed = 0.0
        self._streak = 0  # consecutive outliers; negative: too fast
        self._seconds = 0.0  # since the covariance last grew

    def ms(self, rows: Any, requests: int, heads: Any) -> Any:
        """Expected time of a step, or of n steps with ``rows`` [n] and ``heads``, one or [n]."""
        rows = np.asarray(rows)
        found = self._at(_PLAIN, rows) * np.maximum(rows / self.max_rows, 1.0)
        found = found + np.where(rows > requests, self._at(_TREES, rows - requests), 0.0)
        running = np.where(np.greater(heads, 0), _of_heads(np.asarray(heads)), 0.0)
        found = found + running * self._at(_HEADS, requests)
        return math.exp(self._log_speed) * found

    def plain_ms(self, requests: int) -> float:
        """Expected time of a step without drafts and heads."""
        values = (weight * self._values[at] for at, weight in self._beside(_PLAIN, requests))
        return float(sum(values)) * math.exp(self._log_speed)

    def observe(self, rows: int, requests: int, heads: float, ms: float) -> float | None:
        """Update from a step; return its expected milliseconds.

        None if it was not used, for lack of requests or time.
        """
        if not (0 < ms < math.inf and 0 < requests <= rows):
            return None
        parts = [(_PLAIN, rows, 1.0)]
        parts += [(_TREES, rows - requests, 1.0)] if rows > requests else []
        parts += [(_HEADS, requests, float(_of_heads(heads)))] if heads > 0 else []
        found = [(at, w * factor) for part, n, factor in parts for at, w in self._beside(part, n)]
        places = [at for at, _ in found]
        slopes = self._values[places] * [weight for _, weight in found]
        total = float(slopes.sum())
        slopes /= total  # d log(time) / d log(knot)
        error = math.log(ms / total) - self._log_speed
        if self.steps == 0:
            self._log_speed, error = self._log_speed + error, 0.0
        expected = total * math.exp(self._log_speed)
        self.steps += 1
        self._age(ms / 1e3)
        along = self._covariance[:, places] @ slopes
        known = float(slopes @ along[places])
        bound = _MAX_ERROR * math.sqrt(known + _NOISE)
        if abs(error) > bound and self._is_change(error):
            along = self._covariance[:, places] @ slopes
            known, bound = float(slopes @ along[places]), math.inf
        elif abs(error) <= bound:
            self._streak = 0
        error = min(max(error, -bound), bound)
        whole = known + _SPEED + _NOISE
        self._logs += along * (error / whole)
        self._covariance -= np.outer(along / whole, along)
        self._log_speed += _SPEED / whole * error
        self._values = np.exp(self._logs)
        return expected

    def _is_change(self, error: float) -> bool:
        """Whether enough consecutive steps had errors of one sign; if so, reset the covariance."""
        side = 1 if error > 0 else -1
        self._streak = max(self._streak * side, 0) * side + side
        if abs(self._streak) < _STREAK:
            return False
        self._streak = 0
        self.surprises += 1
        self._covariance = self._changed.copy()
        return True

    def _age(self, seconds: float) -> None:
        self._seconds += min(seconds, 1.0)
        if self._seconds > 1.0:
            self._covariance += _DRIFT * self._seconds * (self._unseen - self._covariance)
            self._seconds = 0.0

    def _at(self, curve: int, counts: Any) -> Any:
        size = len(self._list)
        return np.interp(counts, self._knots, self._values[curve * size : (curve + 1) * size])

    def _beside(self, curve: int, count: int) -> Iterator[tuple[int, float]]:
        """The places in ``_logs`` on both sides of a count, and their interpolation weights."""
        right = min(max(bisect_right(self._list, count), 1), len(self._list) - 1)
        low, high = self._list[right - 1], self._list[right]
        share = min(max((count - low) / (high - low), 0.0), 1.0)
        for at, weight in ((right - 1, 1.0 - share), (right, share)):
            if weight > 0:
                yield curve * len(self._list) + at, weight

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the covariance."""
        return {
            "max_rows": self.max_rows,
            "steps": self.steps,
            "log_speed": round(self._log_speed, 5),
            "log_curves": self._logs.reshape(len(_FIRST), -1).round(5).tolist(),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> StepCost:
        """Read the output of `to_dict` as a prior for the shapes of the curves.

        Raises:
            ValueError: Not a step-cost document.

        """
        try:
            cost = cls(int(document["max_rows"]))
            cost.steps, cost._log_speed = int(document["steps"]), float(document["log_speed"])
            cost._logs[:] = np.array(document["log_curves"], np.float64).reshape(len(cost._logs))
            cost._values = np.exp(cost._logs)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a step-cost document ({error!r})") from None
        numbers = np.append(cost._logs, cost._log_speed)
        if not (np.abs(numbers) < 50).all() or cost.steps < 1:
            raise ValueError(f"not a step-cost document ({cost.steps} steps)")
        return cost


def _of_heads(share: Any) -> Any:
    return _FIRST_HEAD + (1.0 - _FIRST_HEAD) * share
