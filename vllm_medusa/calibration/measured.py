"""Tokens per step of some prompts, and how much prompts differ in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.tree.topology import Path


@dataclass(frozen=True)
class Measured:
    """Accepted tokens and steps of every prompt, over all its samples."""

    accepted: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Tokens per verification step; NaN without steps."""
        return 1 + sum(self.accepted) / sum(self.steps) if sum(self.steps) else math.nan

    @property
    def standard_error(self) -> float:
        """Of tau, from prompt to prompt (a ratio of sums); NaN for one prompt.

        Samples of a prompt are alike, so it is prompts that count.
        """
        count, steps = len(self.steps), sum(self.steps)
        if count < 2 or not steps:
            return math.nan
        extra = self.tau - 1
        spread = sum((a - extra * n) ** 2 for a, n in zip(self.accepted, self.steps, strict=True))
        return math.sqrt(count / (count - 1) * spread) / steps


def walked_by_prompt(observations: Observations, paths: list[Path]) -> Measured:
    """The same of walks: all samples of a prompt together."""
    accepted, steps = [], []
    for prompt in sorted(set(observations.prompts.tolist())):
        own = [text for text, key in enumerate(observations.prompts) if key == prompt]
        walks = Walks(observations.texts(own))
        for path in paths:
            walks.add(path)
        visits = walks.visits()
        accepted.append(int(visits[1:].sum()))
        steps.append(int(visits[0]))
    return Measured(tuple(accepted), tuple(steps))
