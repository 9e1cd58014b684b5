"""Heads in two goes: the deep ones run only where a draft is likely enough to get there.

What a step gains from deep heads is at most what survives to them, and unsure drafts, the most of
all, don't. A second go may have to read an LM head again, which can be larger than all that the
heads have of their own; so the goes are one where deep heads are needed often.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_medusa.proposer.candidates import Choices

LEAST = 0.15  # survival of the likeliest draft from which on it is worth looking below it
FIRST = 2  # levels of the first go
_WINDOW = 32.0  # steps by which it is known how often the second is needed


class Stages:
    """Decides from step to step, alike on all ranks; waits for the device."""

    def __init__(self, own: int, again: int) -> None:
        """Decide by what is read.

        Args:
            own: weights that one head has for itself.
            again: weights that are read once a go, whatever heads run.

        """
        self._own, self._again = own, again
        self._needed = 0.0  # share of steps, of late, that needed deep heads

    def choices(
        self, ask: Callable[[int, int], Choices], depth: int, useful: Tensor, least: float
    ) -> Choices:
        """The choices [B, D, K] of the first ``depth`` heads, or of `FIRST` if these are enough.

        Args:
            ask: for the choices of the heads from one on and below another.
            depth: heads at most.
            useful: int64 [B], the deepest node that each request has a use for.
            least: survival below which no request's best draft is looked below.

        """
        if depth <= FIRST:
            return ask(0, depth)
        saved = (1.0 - self._needed) * (depth - FIRST) * self._own
        whole = saved <= self._needed * self._again
        found = ask(0, depth if whole else FIRST)
        survival = found.log_confidence[:, :FIRST, 0].sum(1).exp()
        needed = bool(((survival >= least) & (useful > FIRST)).any())
        self._needed += (needed - self._needed) / _WINDOW
        if whole or not needed:
            return found
        rest = ask(FIRST, depth)
        return Choices(
            torch.cat([found.token_ids, rest.token_ids], 1),
            torch.cat([found.log_confidence, rest.log_confidence], 1),
        )
