"""How Medusa-2's two ingredients run over the steps: the heads' weight and the learning rates.

lambda_0, the heads' weight beside the target's own loss, grows to its peak, because what untrained
heads ask of the backbone would spoil it (Medusa, https://arxiv.org/abs/2401.10774, section 2.2.2).
The paper's recipes (appendix B): on text of others a peak of 0.2 after heads trained alone
(Vicuna 7B and 13B), on self-distilled text a peak of 0.01 that grows as a sine until the last step
(Vicuna 33B, Zephyr). The reference trainer's "sine", "linear" and "constant" are these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Growth = Literal["sine", "linear", "constant"]
GROWTHS: tuple[str, ...] = get_args(Growth)
PEAK_SELF_DISTILLED = 0.01  # appendix B.3
PEAK_OTHER = 0.2  # appendix B.2
HEADS_RATE = 4.0  # the heads' learning rate over the backbone's, appendix B.1


class ScheduleError(ValueError):
    """A schedule that can't be run."""


@dataclass(frozen=True)
class HeadsWeight:
    """lambda_0 over the joint steps."""

    peak: float = PEAK_SELF_DISTILLED
    growth: Growth = "sine"
    share: float = 1.0  # of the steps in which it grows; afterwards it stays at its peak

    def __post_init__(self) -> None:
        if not 0 <= self.peak < math.inf:
            raise ScheduleError(f"lambda_0 is {self.peak}; use a number from 0")
        if self.growth not in GROWTHS:
            raise ScheduleError(f"growth {self.growth!r}; use one of {', '.join(GROWTHS)}")
        if not 0 < self.share <= 1:
            raise ScheduleError(f"share {self.share}; use more than 0, at most 1")

    def at(self, step: int, steps: int) -> float:
        """lambda_0 of the 0-based ``step`` of ``steps``: above 0 at the first, the peak at last."""
        if self.growth == "constant":
            return self.peak
        done = min(1.0, (step + 1) / (steps * self.share))
        return self.peak * (math.sin(done * math.pi / 2) if self.growth == "sine" else done)
