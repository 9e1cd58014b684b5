"""Sample one token from one row of logits: truncation and random draw, as in vLLM.

The oracle must sample the same tokens as vLLM for a seeded request, so both of vLLM's methods are
here. Each advances the generator by the same amount per token, independent of the logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_medusa.noise import splitmix_gumbel

Draw = Callable[[Tensor, torch.Generator | None], Tensor]  # fp32 logits [V] -> int64 []


def truncate_logits(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Mask by top-k, then top-p, with -inf: fp32 [R, V], after the temperature.

    ``top_k`` <= 0 or >= V, and ``top_p`` >= 1, mask nothing. Values tied with the
    k-th largest are kept. Top-p keeps the smallest set of tokens, of the renormalized top k, whose
    probability exceeds it, and at least one.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        # fp32 as vLLM's per-request top_p: 1 - p must be rounded the same way.
        rest = 1 - torch.tensor(top_p, dtype=torch.float32, device=logits.device)
        drop = ascending.softmax(-1).cumsum(-1) <= rest
        drop[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
    return logits


def draw_exponential(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample like vLLM's native sampler (GPU): V exponential variates, argmax of p / q."""
    probs = logits.softmax(-1, dtype=torch.float32)
    return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)


def draw_splitmix(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample like vLLM's CPU sampler (x86, ARM): one seed, then Gumbel noise hashed from it."""
    seed = torch.randint(0, 2**31, (1,), generator=generator, device=logits.device)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (logits.double() + splitmix_gumbel(seed, ids)).argmax(-1)
