# mypy: allow-untyped-defs
"""The noise of V2's sampler, a function of seed, position and token: vLLM's own in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_medusa.integration.requests import RequestOptions

_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class HashedNoise:
    """See `noise.Stream`; no host sync."""

    seeds: Tensor  # int64 [slots], vLLM's
    slots: Tensor  # integer [B]
    positions: Tensor  # integer [B], of the requests' last tokens
    temperature: Tensor  # fp32 [B]

    def gumbel(self, first: int, stop: int, token_ids: Tensor) -> Tensor:
        """See `noise.Stream`; zeros at temperature 0."""
        given = token_ids, self.seeds, self.slots, self.positions, self.temperature
        batch, levels, count = len(self.slots), stop - first, len(token_ids)
        found = torch.empty((batch, levels, count), device=token_ids.device)
        _gumbel_kernel[(batch, levels, triton.cdiv(count, _BLOCK))](
            found, *(each.contiguous() for each in given), first, count, BLOCK=_BLOCK
        )
        return found


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


@triton.jit(do_not_specialize=["first", "count"])
def _gumbel_kernel(
    out_ptr,  # fp32 [B, levels, count]
    ids_ptr,  # int64 [count]
    seeds_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    first,
    count,
    BLOCK: tl.constexpr,
):
    request, level = tl.program_id(0), tl.program_id(1)
    block = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = block < count
    noise = tl.zeros((BLOCK,), tl.float32)
    if tl.load(temperature_ptr + request) > 0:
        seed = tl.load(seeds_ptr + tl.load(slots_ptr + request).to(tl.int64))
        position = tl.load(positions_ptr + request).to(tl.int64) + first + level
        ids = tl.load(ids_ptr + block, mask=inside, other=0)
        uniform = murmur3_uniform32(seed, position, ids)
        noise = -tl.log(-_log1p_neg_stable(uniform))
    row = (request * tl.num_programs(1) + level).to(tl.int64)
    tl.store(out_ptr + row * count + block, noise, mask=inside)
