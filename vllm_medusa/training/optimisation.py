"""AdamW, a warm-up and a cosine, clipping by norm: what every recipe steps its parameters with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm_medusa.training.options import WARMUP_STEPS, StepOptions


@dataclass(frozen=True)
class Optimisation:
    """How parameters are stepped.

    ``warmup_steps`` are cut to a tenth of the run; ``weight_decay`` acts on matrices only; ``clip``
    bounds the norm of all gradients together.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = WARMUP_STEPS
    weight_decay: float = StepOptions.weight_decay
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = StepOptions.clip


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate at ``step`` (from 0): a line up to 1, then a cosine towards 0."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def make_optimizer(
    groups: Sequence[tuple[Iterable[nn.Parameter], float]], settings: Optimisation
) -> torch.optim.AdamW:
    """AdamW over (parameters, factor of the learning rate) groups; frozen parameters stay out.

    Raises:
        ValueError: nothing requires a gradient.

    """
    options: list[dict[str, Any]] = []
    for parameters, factor in groups:
        chosen = [p for p in parameters if p.requires_grad]
        for decay, members in (
            (settings.weight_decay, [p for p in chosen if p.dim() >= 2]),
            (0.0, [p for p in chosen if p.dim() < 2]),
        ):
            if members:
                options.append({"params": members, "weight_decay": decay, "factor": factor})
    if not options:
        raise ValueError("no parameter requires a gradient; there is nothing to train")
    return torch.optim.AdamW(options, lr=settings.learning_rate, betas=settings.betas)


def set_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, how: Optimisation) -> float:
    """Set every group's learning rate for ``step``; returns that of factor 1."""
    rate = how.learning_rate * rate_at(step, steps, how.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    return rate


def clip_gradients(optimizer: torch.optim.Optimizer, bound: float) -> Tensor:
    """Scale all gradients down to a norm of ``bound``; returns the norm before, fp32 scalar.

    A norm that isn't finite leaves the gradients as they are: look at it before stepping.
    """
    grads = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(grads)
    if bool(torch.isfinite(norm)):
        for grad in grads:
            grad.mul_((bound / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype))
    return norm
