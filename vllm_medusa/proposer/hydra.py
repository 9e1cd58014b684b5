"""Hydra's heads behind the builder of trees: head i scores what follows each node of depth i."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads, PackedHydra
from vllm_medusa.heads.model import LMHead
from vllm_medusa.proposer.candidates import Choices
from vllm_medusa.proposer.dynamic import marginals

Embed = Callable[[Tensor], Tensor]  # int64 [..] -> [.., H]
Choose = Callable[[Tensor, int, Tensor | None], Choices]  # logits [B, k, V], width, factors [k]


class HydraStep:
    """The heads at one step of B requests; see `build.Branching`."""

    def __init__(
        self,
        heads: HydraHeads | PackedHydra,
        hidden_states: Tensor,  # [B, H], as for `proposer.draft`
        embed: Embed,  # the target's embedding, unscaled
        lm_head: LMHead | None = None,
        sharpness: Tensor | None = None,  # float32 [>= levels], factors on the logits; None: 1
        choose: Choose | None = None,  # how choices are read off logits; None: they are whole
    ) -> None:
        self._heads, self._embed, self._lm_head = heads, embed, lm_head
        self._sharpness, self._choose = sharpness, choose or self._whole
        self._seen = hidden_states.unsqueeze(1)  # [B, k, (level + 1) * H] above the nodes

    def expand(self, level: int, tokens: Tensor, parents: Tensor, width: int) -> Choices:
        """See `build.Branching`."""
        batch, nodes = tokens.shape
        above = self._seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, self._seen.shape[2]))
        self._seen = torch.cat([above, self._embed(tokens).to(above)], -1)
        x = self._heads.level(level, self._seen.flatten(0, 1))  # [B * k, H]
        logits = self._heads.level_logits(level, x, self._lm_head).unflatten(0, (batch, nodes))
        factors = None if self._sharpness is None else self._sharpness[level].expand(nodes)
        return self._choose(logits, width, factors)

    def _whole(self, logits: Tensor, width: int, factors: Tensor | None) -> Choices:
        return marginals(logits, logits.shape[1], width, factors, self._heads.token_map)
