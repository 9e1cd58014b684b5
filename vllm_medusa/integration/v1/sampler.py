"""vLLM's sampler for CPUs: with given tokens, and with a faster draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import (
    PROCESSED_LOGPROBS_MODES,
    TopKTopPSampler,
    apply_top_k_top_p,
)
from vllm.v1.sample.sampler import Sampler

from vllm_medusa.noise import gumbel_argmax
from vllm_medusa.sampler import NO_TOKEN


class GuidedSampler(Sampler):
    """vLLM's sampler, but some requests' tokens may be given; logprobs are then for these."""

    tokens: Tensor | None = None  # int64 [B], `NO_TOKEN`: sampled

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.topk_topp_sampler = FastDraws(self.logprobs_mode, self.use_fp64_gumbel)

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As in vLLM, with the given tokens."""
        sampled, logprobs = super().sample(*args, **kwargs)
        if self.tokens is not None:
            sampled = torch.where(self.tokens == NO_TOKEN, sampled, self.tokens)
        return sampled, logprobs


class FastDraws(TopKTopPSampler):
    """vLLM's draws, by vectors on all cores.

    vLLM's kernel uses one core per row, and one token at a time: 210 us for 49,152 tokens. It still
    decides where the two largest sums of logit and noise are too close for fp32.
    """

    def forward_cpu(
        self,
        logits: Tensor,  # [B, V]
        generators: dict[int, torch.Generator],
        k: Tensor | None,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [B], see vLLM's method."""
        if self.use_fp64_gumbel or self.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            return super().forward_cpu(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p).float()
        seeds = torch.randint(0, 2**31, (len(logits),))
        for row, generator in generators.items():
            seeds[row] = torch.randint(0, 2**31, (1,), generator=generator).item()
        tokens = gumbel_argmax(logits, seeds)
        unclear = tokens < 0
        if unclear.any():
            decided = torch.ops._C.fused_gumbel_argmax(logits[unclear], seeds[unclear])
            tokens[unclear] = decided
        return tokens, None


def draws_splitmix(sampler: GuidedSampler) -> bool:
    """Whether the noise is hashed from one seed per token, as vLLM does on x86 and ARM."""
    own = sampler.topk_topp_sampler
    return own.forward == own.forward_cpu and not own.use_fp64_gumbel
