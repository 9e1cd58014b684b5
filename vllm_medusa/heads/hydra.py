"""Hydra heads: each depends on the draft tokens before its own (arXiv 2402.05109).

Head h turns [state, e(x_1), .., e(x_(h+1))] into logits for the token after them: x_1 is the
target's last token, e its embedding. The first layer maps these (h + 2) * H values to H:
``R x + r + silu(W x + b)``; later layers and LM heads are Medusa's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_medusa.heads.cpu import Linear, MakeLinear, Packed
from vllm_medusa.heads.model import MedusaHeads, ResBlock


class HydraInput(nn.Module):
    """The first layer of head ``head``, [.., (head + 2) * H] -> [.., H].

    It starts as the identity on the state: an untrained head gives the target's logits.
    """

    def __init__(
        self,
        hidden_size: int,
        head: int,
        **where: Any,  # device and dtype
    ) -> None:
        super().__init__()
        shape = (hidden_size, (head + 2) * hidden_size)
        self.weight = nn.Parameter(torch.zeros(*shape, **where))
        self.bias = nn.Parameter(torch.zeros(hidden_size, **where))
        self.skip_weight = nn.Parameter(torch.eye(*shape, **where))
        self.skip_bias = nn.Parameter(torch.zeros(hidden_size, **where))

    def forward(self, x: Tensor) -> Tensor:
        """[.., (head + 2) * H] -> [.., H]."""
        skip = F.linear(x, self.skip_weight, self.skip_bias)
        return skip + F.silu(F.linear(x, self.weight, self.bias))


class HydraHeads(MedusaHeads):
    """K Hydra heads of L >= 1 layers each; ``blocks`` are the layers after the first.

    ``lm_heads`` (and ``token_map``) are as in `MedusaHeads`; input tokens are target ids.
    """

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **lm_heads: Any,
    ) -> None:
        where: Any = {"device": device, "dtype": dtype}
        super().__init__(num_heads, num_layers - 1, hidden_size, vocab_size, **where, **lm_heads)
        self.num_layers = num_layers
        self.inputs = nn.ModuleList(
            HydraInput(hidden_size, head, **where) for head in range(num_heads)
        )
        self.embedding: Tensor | None = None  # [>= vocab_size, H]; owned by the target

    def use_target_embedding(self, weight: Tensor) -> None:
        """Bind the target's embedding [>= vocab_size, H], without copying it."""
        self.embedding = weight.detach()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of token ids, any shape: int64 [..] -> [.., H]."""
        assert self.embedding is not None, "call use_target_embedding first"
        return F.embedding(tokens, self.embedding)

    def forward(
        self, hidden_states: Tensor, num_heads: int | None = None, path: Tensor | None = None
    ) -> Tensor:
        """The first ``num_heads`` heads along one path each: [B, H] -> [B, K, H].

        ``path`` is int64 [B, >= K]: the tokens x_1 .. x_K that follow each state.
        """
        k = self.num_heads if num_heads is None else num_heads
        assert path is not None, "Hydra heads depend on the preceding tokens"
        seen = torch.cat([hidden_states, self.embed(path[:, :k]).to(hidden_states).flatten(1)], 1)
        size = self.hidden_size
        x = torch.stack([self.inputs[h](seen[:, : (h + 2) * size]) for h in range(k)], 1)
        for block in self.blocks:
            x = block(x, k)
        return x

    def level(self, head: int, seen: Tensor) -> Tensor:
        """One head at any number of nodes: [T, (head + 2) * H] -> [T, H]."""
        x = self.inputs[head](seen)
        for block in self.blocks:
            assert isinstance(block, ResBlock)
            bias = None if block.bias is None else block.bias[head]
            x = x + F.silu(F.linear(x, block.weight[head], bias))
        return x


class PackedHydra(Packed):
    """Packed `HydraHeads.level`."""

    def __init__(self, heads: HydraHeads, make: MakeLinear) -> None:
        super().__init__(heads, make)
        self._first: list[Linear] = []  # skip and layer in one product
        for first in heads.inputs:
            assert isinstance(first, HydraInput)
            both = torch.cat([first.skip_weight, first.weight]).detach()
            self._first.append(make(both, torch.cat([first.skip_bias, first.bias]).detach()))

    def level(self, head: int, seen: Tensor) -> Tensor:
        """One head at any number of nodes: [T, (head + 2) * H] -> [T, H]."""
        skip, x = self._first[head](seen).chunk(2, -1)
        x = skip + F.silu(x)
        for layer in self._layers:
            x = x + F.silu(layer[head](x))
        return x
