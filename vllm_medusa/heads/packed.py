"""Heads whose weight matrices were handed to a backend's own matrix product.

Drafting reads every weight of the heads once a step, for a handful of rows: the speed of that is
the speed of the product. A backend that packs weights beforehand (oneDNN on CPUs) reads them two
to three times faster than the batched products of `MedusaHeads`, at the price of one call a matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.heads.model import HeadsError, LMHead, MedusaHeads, ResBlock

Linear = Callable[[Tensor], Tensor]  # [T, I] -> [T, O]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # weight [O, I], bias [O]


class PackedHeads:
    """Computes what `MedusaHeads` computes; for inference only.

    The heads given are not kept: once they are dropped, only what ``make`` packed stays in memory.
    """

    def __init__(self, heads: MedusaHeads, make: MakeLinear, rows: slice | None = None) -> None:
        """Pack ``heads`` with ``make``; ``rows`` keeps a part of the vocabulary of stored LM heads.

        With ``rows`` their logits are [B, K, len(rows)]: a tensor-parallel rank's columns.
        """
        self.num_heads = heads.num_heads
        self.vocab_size = heads.vocab_size
        self.token_map = heads.token_map
        check_packable(heads)
        self.own_weights = 0  # of a head's residual layers
        self._layers: list[list[Linear]] = []
        for block in heads.blocks:
            assert isinstance(block, ResBlock)
            weight = block.weight.detach()  # [K, H, H]
            self.own_weights += weight[0].numel()
            bias = None if block.bias is None else block.bias.detach()  # [K, H]
            self._layers.append(_per_head(make, weight, bias))
        self._lm_heads: list[Linear] = []
        if heads.lm_head_weight is not None:
            weight = heads.lm_head_weight.detach()  # [M, V_draft, H]
            bias = None if heads.lm_head_bias is None else heads.lm_head_bias.detach()
            if rows is not None:  # copied, so that nothing holds on to the other rows
                weight = weight[:, rows].clone()
                bias = None if bias is None else bias[:, rows].clone()
            self._lm_heads = _per_head(make, weight, bias)

    def __call__(
        self, hidden_states: Tensor, num_heads: int | None = None, first: int = 0
    ) -> Tensor:
        """Residual layers of the first ``num_heads`` heads (all): [B, H] -> [B, K, H].

        Those before ``first`` are left out.
        """
        k = self.num_heads if num_heads is None else min(num_heads, self.num_heads)
        x = hidden_states.unsqueeze(1).expand(-1, k - first, -1)
        for layer in self._layers:
            x = x + F.silu(_apply(layer[first:], x))
        return x

    def compute_logits(self, x: Tensor, lm_head: LMHead | None = None, first: int = 0) -> Tensor:
        """Logits over the draft vocabulary: [B, K, H] -> [B, K, V_draft].

        ``lm_head`` is the target's, as for `MedusaHeads.compute_logits`; x is of the heads from
        ``first`` on.
        """
        batch, k, _ = x.shape
        if len(self._lm_heads) == self.num_heads and self.num_heads > 1:
            return _apply(self._lm_heads[first:], x)
        rows = x.flatten(0, 1)  # [B * K, H]
        if self._lm_heads:
            return self._lm_heads[0](rows).unflatten(0, (batch, k))
        if lm_head is None:
            raise HeadsError("these heads share the target's LM head: pass lm_head")
        return lm_head(rows)[:, : self.vocab_size].unflatten(0, (batch, k))


def check_packable(heads: MedusaHeads) -> None:
    """Refuse heads whose logits a backend can't make as they are."""
    if heads.target_lm_head is not None:
        raise HeadsError("these heads have the target's LM head bound: pack unbound ones")
    if heads.shared_lm_head and heads.token_map is not None:
        raise HeadsError(
            "these heads score some of the target's tokens: store the target's rows of these "
            "(store_lm_head), then pack them"
        )


def _per_head(make: MakeLinear, weight: Tensor, bias: Tensor | None) -> list[Linear]:
    """One product for each head: weight [K, O, I], bias [K, O]."""
    biases = [None] * len(weight) if bias is None else list(bias.unbind())
    return [make(matrix, vector) for matrix, vector in zip(weight.unbind(), biases, strict=True)]


def _apply(linears: list[Linear], x: Tensor) -> Tensor:
    """Head by head, the first K: [B, K, I] -> [B, K, O]."""
    return torch.stack([linears[head](x[:, head]) for head in range(x.shape[1])], 1)
