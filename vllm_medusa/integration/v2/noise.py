"""The noise of V2's sampler, a function of seed, position and token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_medusa.integration.requests import RequestOptions
from vllm_medusa.integration.v2.kernel import gumbel_noise


@dataclass(frozen=True, eq=False)
class HashedNoise:
    """See `noise.Stream`; no host sync."""

    seeds: Tensor  # int64 [slots], vLLM's
    slots: Tensor  # integer [B]
    positions: Tensor  # integer [B], of the requests' last tokens
    temperature: Tensor  # fp32 [B]

    def gumbel(self, first: int, stop: int, token_ids: Tensor) -> Tensor:
        """See `noise.Stream`."""
        where = self.seeds, self.slots, self.positions, self.temperature
        return gumbel_noise(*where, first, stop, token_ids)


def persistent_draws(sampler: Sampler, requests: RequestOptions, slots: np.ndarray) -> np.ndarray:
    """Temperatures, float32 [B], of requests whose noise at a position never changes; 0: others.

    In some steps a fused sampler draws the tokens of unseeded requests: noise known in advance
    would then be used if drafts benefit from it and discarded otherwise, which would bias the
    tokens.
    """
    temperature = requests.draw_temperature(slots)
    if sampler.use_fp64_gumbel:
        return np.zeros_like(temperature)
    if sampler.use_flashinfer or sampler.use_xpu_sampler:
        temperature = temperature * sampler.sampling_states.seeds_set[slots]
    return temperature
