"""Tokens per step as they really come: prompts decoded with the tree, by the oracle.

Lossless sampling at the calibration's temperature is what the walks foretell (greedy, if that is
0), so the estimates can be held against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_medusa.decode import decode
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.tree.topology import TokenTree


@dataclass(frozen=True)
class Measured:
    """Accepted tokens and steps of every prompt."""

    accepted: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Tokens per verification step; NaN without steps."""
        return 1 + sum(self.accepted) / sum(self.steps) if sum(self.steps) else math.nan

    @property
    def standard_error(self) -> float:
        """Of tau, from prompt to prompt (a ratio of sums); NaN for one prompt."""
        count, steps = len(self.steps), sum(self.steps)
        if count < 2 or not steps:
            return math.nan
        extra = self.tau - 1
        spread = sum((a - extra * n) ** 2 for a, n in zip(self.accepted, self.steps, strict=True))
        return math.sqrt(count / (count - 1) * spread) / steps


def measure(
    model: Any,  # a causal LM of transformers, on the heads' device
    heads: MedusaHeads,
    tree: TokenTree,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    end_tokens: Collection[int] = (),
    progress: Callable[[int], object] = lambda prompts: None,
) -> Measured:
    """Decode every prompt (token ids); prompt i is sampled with the seed ``seed + i``."""
    device = model.get_input_embeddings().weight.device
    accepted, steps = [], []
    for number, ids in enumerate(prompts):
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
        accepted.append(sum(result.accepted_per_step))
        steps.append(len(result.accepted_per_step))
        progress(1)
    return Measured(tuple(accepted), tuple(steps))
