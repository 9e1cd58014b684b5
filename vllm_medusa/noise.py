"""Drafting with the request's sampling noise: choose children that the target is likely to draw.

A sampled token is argmax(log p / T + G), with Gumbel noise G that depends on the request's random
stream and the position, not on p; so G is known before the target has run. Children are chosen by

    a * log q + b * G        a = min(1, SCALE / T),  b = a * T * WEIGHT

instead of log q, so tokens that G favors are preferred. The acceptance rule is unchanged: a child
is accepted if and only if it is the token drawn, and each position's noise is used once, for its
token. So the tokens, seeded or not, are the same as without drafts (arXiv 2408.07978, 2506.05632).

SCALE and WEIGHT are below 1 because drafters approximate p only roughly; with the full weight of G,
q would have too much influence. With SmolLM2's Hydra heads and trees of seven nodes, tau was 1.69
without and 1.74 with noise at T 0.7, and 1.46 and 1.62 at T 1 (benchmarks/results/noise_hydra.md).
Top-k and top-p are not applied to q, because tokens outside q's own top-k or top-p set are drawn
often: one of four children of the root is drawn in 53.7 % of cases at T 1.0 and top-p 0.9; in
51.6 % if q is masked, in 46.1 % without noise (simulated).
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm_medusa.kernels import cpu_function

SCALE, WEIGHT = 0.7, 0.75

_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64 (Steele et al. 2014)
_GAMMA = 0x9E3779B97F4A7C15
_TWISTER = slice(3, 3 + 624)  # words of the Mersenne Twister in `torch.Generator.get_state`, int64
_gumbel_noise = cpu_function("gumbel_noise", c_void_p, c_int64, c_void_p, c_int64, c_void_p)
_gumbel_argmax = cpu_function("gumbel_argmax", c_void_p, c_int64, c_int64, c_void_p, c_void_p)


class Stream(Protocol):
    """The noise of the next tokens of B requests."""

    @property
    def temperature(self) -> Tensor:
        """Sampling temperature, fp32 [B]; 0: no noise for this request."""
        ...

    def gumbel(self, first: int, stop: int, token_ids: Tensor) -> Tensor:
        """Noise of tokens, int64 [V], at levels ``first`` to ``stop`` - 1: fp32 [B, levels, V].

        Level 0 is the next token. Finite for every request.
        """
        ...


@dataclass(frozen=True, eq=False)
class Seeds:
    """The noise of vLLM's CPU sampler: each token's noise is hashed from a seed per position."""

    seeds: Tensor  # int64 [B, D], those that the sampler will draw; -1: no noise
    temperature: Tensor  # fp32 [B]

    def gumbel(self, first: int, stop: int, token_ids: Tensor) -> Tensor:
        """See `Stream`."""
        seeds, ids = self.seeds[:, first:stop].contiguous(), token_ids.contiguous()
        found = torch.empty((*seeds.shape, len(ids)))
        where = ids.data_ptr(), len(ids), found.data_ptr()
        _gumbel_noise(seeds.data_ptr(), seeds.numel(), *where)
        return found


def next_seeds(generator: torch.Generator | None, count: int) -> Tensor:
    """The seeds of the next ``count`` tokens, int64 [count]; the generator is not advanced."""
    ahead = (torch.default_generator if generator is None else generator).clone_state()
    return torch.randint(0, 2**31, (count,), generator=ahead, device=ahead.device)


def own_generator() -> torch.Generator:
    """A CPU generator whose whole state is drawn from the default one.

    A seed is not enough: the generator uses only 32 bits of it, so among 77,000 requests two would
    share a random stream with a probability of one half.
    """
    generator = torch.Generator()
    state = generator.get_state()
    state.view(torch.int64)[_TWISTER].random_(0, 2**32)
    generator.set_state(state)
    return generator


class Noise:
    """The noise of B requests over a drafter's vocabulary."""

    def __init__(self, stream: Stream, token_ids: Tensor) -> None:
        """``token_ids``, int64 [V_draft], are the tokens that the drafter scores."""
        temperature = stream.temperature
        self._stream, self._token_ids = stream, token_ids
        self._logit_scale = torch.where(temperature > 0, (SCALE / temperature).clamp_max(1.0), 1.0)
        self._noise_scale = self._logit_scale * temperature * WEIGHT

    def at(self, first: int, stop: int) -> LevelNoise:
        """The noise of the levels ``first`` to ``stop`` - 1."""
        gumbel = self._stream.gumbel(first, stop, self._token_ids)
        return LevelNoise(gumbel, self._logit_scale, self._noise_scale)


@dataclass(frozen=True, eq=False)
class LevelNoise:
    """The noise of L levels, or of one level, shared by its nodes."""

    gumbel: Tensor  # fp32 [B, L, V_draft]
    logit_scale: Tensor  # fp32 [B], the factor a
    noise_scale: Tensor  # fp32 [B], the factor b

    def scores(self, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        """The scores to rank children by: logits [B, k, >= V_draft] -> fp32 [B, k, V_draft].

        ``sharpness`` [>= k] are factors on the logits; k is L, or any number if L is 1.
        """
        scale = self.logit_scale[:, None, None]
        if sharpness is not None:
            scale = scale * sharpness[: logits.shape[1], None]
        own = logits[..., : self.gumbel.shape[2]].float() * scale
        return torch.addcmul(own, self.gumbel, self.noise_scale[:, None, None])


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Argmax of logits and noise: fp32 [B, V], int64 [B] -> int64 [B].

    -1 where the two largest sums are too close for fp32, or there are none.
    """
    logits, seeds = logits.contiguous(), seeds.contiguous()
    tokens = torch.empty_like(seeds)
    _gumbel_argmax(logits.data_ptr(), *logits.shape, seeds.data_ptr(), tokens.data_ptr())
    return tokens


def splitmix_gumbel(seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of tokens int64 [V] for seeds int64 [.., 1]: fp64 [.., V].

    The seed s and token i give 53 bits ``mix(mix(s) + (i + 1) * gamma) >> 11``, centered in (0, 1).
    """
    bits = _shift_right(_mix(_mix(seeds) + (token_ids + 1) * _signed(_GAMMA)), 11)
    return -(-((bits.double() + 0.5) * 2.0**-53).log()).log()


def _mix(word: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 words, which wrap as unsigned ones do."""
    for shift, factor in _MIXERS:
        word = (word ^ _shift_right(word, shift)) * _signed(factor)
    return word ^ _shift_right(word, 31)


def _shift_right(word: Tensor, count: int) -> Tensor:
    return (word >> count) & ((1 << (64 - count)) - 1)  # logical shift, without sign bits


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
