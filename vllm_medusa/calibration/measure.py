"""Tokens per step by walking texts and by decoding for real, and how much prompts differ in it.

Lossless sampling at the calibration's temperature is what the walks predict (greedy, if that is 0),
so the estimates can be held against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.walks import Walks
from vllm_medusa.decode import decode
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.tree.topology import Path, TokenTree


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
    for prompt in np.unique(observations.prompts):
        own = np.flatnonzero(observations.prompts == prompt).tolist()
        visits = Walks(observations.texts(own), paths).visits()
        accepted.append(int(visits[1:].sum()))
        steps.append(int(visits[0]))
    return Measured(tuple(accepted), tuple(steps))


def measure(
    model: Any,  # a causal LM of transformers, on the heads' device
    heads: MedusaHeads,
    tree: TokenTree,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    samples: int = 1,
    end_tokens: Collection[int] = (),
    progress: Callable[[], object] = lambda: None,
) -> Measured:
    """Decode ``samples`` texts of every prompt (token ids); text i has the seed ``seed + i``."""
    device = model.get_input_embeddings().weight.device
    accepted, steps = [], []
    for prompt, ids in enumerate(prompts):
        results = []
        for number in range(prompt * samples, (prompt + 1) * samples):
            result = decode(
                model,
                heads,
                tree,
                torch.tensor(ids, device=device),
                max_new_tokens,
                temperature=temperature,
                generator=torch.Generator(device).manual_seed(seed + number),
                eos_token_id=end_tokens,
            )
            results.append(result.accepted_per_step)
            progress()
        accepted.append(sum(map(sum, results)))
        steps.append(sum(map(len, results)))
    return Measured(tuple(accepted), tuple(steps))
