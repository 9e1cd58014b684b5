"""Heads whose weight matrices were packed by a backend, for inference only.

Drafting reads every weight of the heads once per step, for a few rows, so matrix products take most
of its time. oneDNN on CPUs reads packed weights two to three times faster than the batched
products of `MedusaHeads`, at the cost of one call per matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.heads.model import LMHead, MedusaHeads, ResBlock

Linear = Callable[[Tensor], Tensor]  # [T, I] -> [T, O]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # weight [O, I], bias [O]


class Packed:
    """Common parts of all heads. Only the output of ``make`` stays in memory."""

    def __init__(self, heads: MedusaHeads, make: MakeLinear) -> None:
        """Pack ``heads`` with ``make``.

        Heads with a token map must store an LM head (`MedusaHeads.store_lm_head`).
        """
        assert heads.token_map is None or not heads.shared_lm_head
        self.num_heads = heads.num_heads
        self.vocab_size = heads.vocab_size
        self.token_map = heads.token_map
        self.own_weights = 0  # number of weights in one head's residual layers
        self._layers: list[list[Linear]] = []
        for block in heads.blocks:
            assert isinstance(block, ResBlock)
            self.own_weights += block.weight[0].numel()
            self._layers.append(_per_head(make, block.weight, block.bias))
        self._lm_heads: list[Linear] = []
        if heads.lm_head_weight is not None:
            self._lm_heads = _per_head(make, heads.lm_head_weight, heads.lm_head_bias)

    def compute_logits(self, x: Tensor, lm_head: LMHead | None = None, first: int = 0) -> Tensor:
        """Logits over the draft vocabulary: [B, K, H] of the heads from ``first`` -> [B, K, V].

        ``lm_head`` is the target's, as for `MedusaHeads.compute_logits`.
        """
        if len(self._lm_heads) == self.num_heads and self.num_heads > 1:
            return _apply(self._lm_heads[first:], x)
        rows = x.flatten(0, 1)  # [B * K, H]
        if self._lm_heads:
            logits = self._lm_heads[0](rows)
        else:
            assert lm_head is not None
            logits = lm_head(rows)[:, : self.vocab_size]  # without padding
        return logits.unflatten(0, x.shape[:2])


class PackedHeads(Packed):
    """Packed `MedusaHeads`."""

    def __call__(
        self, hidden_states: Tensor, num_heads: int | None = None, first: int = 0
    ) -> Tensor:
        """Residual layers of heads ``first`` to ``num_heads`` (or all): [B, H] -> [B, K, H]."""
        k = self.num_heads if num_heads is None else min(num_heads, self.num_heads)
        x = hidden_states.unsqueeze(1).expand(-1, k - first, -1)
        for layer in self._layers:
            x = x + F.silu(_apply(layer[first:], x))
        return x


def _per_head(make: MakeLinear, weight: Tensor, bias: Tensor | None) -> list[Linear]:
    """One product per head: weight [K, O, I], bias [K, O]."""
    biases = [None] * len(weight) if bias is None else list(bias.detach())
    return [make(matrix, vector) for matrix, vector in zip(weight.detach(), biases, strict=True)]


def _apply(linears: list[Linear], x: Tensor) -> Tensor:
    """Head by head, the first K: [B, K, I] -> [B, K, O]."""
    return torch.stack([linears[head](x[:, head]) for head in range(x.shape[1])], 1)
