"""The requests of a V1 batch that accept by the typical rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.config import AcceptanceConfig
from vllm_medusa.worker.requests import GREEDY_BELOW, acceptance_of


@dataclass(frozen=True)
class TypicalRequests:
    """The requests of a batch that accept by the typical rule, among B."""

    mask: list[bool]  # [B]
    epsilon: Tensor  # float32 [B]
    delta: Tensor  # float32 [B]
    greedy_root: list[bool]  # [B]

    @classmethod
    def of(
        cls, params: list[Any], default: AcceptanceConfig, device: torch.device
    ) -> TypicalRequests | None:
        """Collect them from the requests' sampling parameters; None if every one is lossless.

        At temperature 0 typical acceptance is greedy exactly, which the lossless walk is too.
        """
        chosen = [acceptance_of(param, default) for param in params]
        mask = [
            choice.mode == "typical" and param.temperature >= GREEDY_BELOW
            for choice, param in zip(chosen, params, strict=True)
        ]
        if not any(mask):
            return None
        return cls(
            mask=mask,
            epsilon=torch.tensor([choice.epsilon for choice in chosen], device=device),
            delta=torch.tensor([choice.delta for choice in chosen], device=device),
            greedy_root=[
                choice.greedy_root and typical for choice, typical in zip(chosen, mask, strict=True)
            ],
        )
