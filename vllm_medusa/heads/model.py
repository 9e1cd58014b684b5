"""The Medusa heads, all computed in a few batched kernels.

Head h maps the target's last hidden state to logits for the token h + 1 places after the one
the target predicts itself: L residual layers ``x + silu(W x + b)``, then an LM head (Medusa,
https://arxiv.org/abs/2401.10774, section 2.1.1). The K heads have one shape, so the weights of a
layer are stacked: the first layer, whose input all heads share, is one [B, H] x [H, K*H] product,
and every later layer and the LM heads are one batched product each.

M LM heads are stored: K (one for each head, "v1"), 1 (one for all heads, usually over a truncated
vocabulary), or 0 (the target's own is used, "v2").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LMHead = Callable[[Tensor], Tensor]  # [T, H] -> logits [T, >= vocab_size]


class HeadsError(ValueError):
    """Unusable heads or checkpoint; the message has the reason."""


class ResBlock(nn.Module):
    """One residual layer of ``num_heads`` heads: ``x + silu(W x + b)``.

    ``weight`` is [K, H, H] (head, out, in), ``bias`` [K, H] or None. Both start as zeros, so that
    an untrained layer is the identity.
    """

    def __init__(
        self,
        hidden_size: int,
        bias: bool,
        num_heads: int,
        **where: Any,  # device and dtype
    ) -> None:
        super().__init__()
        shape = (num_heads, hidden_size)
        self.weight = nn.Parameter(torch.zeros(*shape, hidden_size, **where))
        self.bias = nn.Parameter(torch.zeros(shape, **where)) if bias else None

    def forward(self, x: Tensor, num_heads: int | None = None) -> Tensor:
        """Apply the first ``num_heads`` heads: x [B, H] (shared) or [B, K, H] -> [B, K, H]."""
        weight = self.weight[:num_heads]  # [K, H, H], contiguous
        bias = None if self.bias is None else self.bias[:num_heads]  # [K, H]
        if x.dim() == 2:
            flat = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
            return x.unsqueeze(1) + F.silu(flat.unflatten(1, weight.shape[:2]))
        return x + F.silu(_per_head_linear(x, weight, bias))


class MedusaHeads(nn.Module):
    """K Medusa heads.

    ``vocab_size`` is the target's. With ``token_map`` (int64 [V_draft], target id of each draft id)
    the heads score only V_draft tokens. ``num_lm_heads`` is K by default; 1 stores one LM head
    for all heads, and 0 stores none. Stored LM heads are initialized to zeros: load them,
    or copy the target's with `init_lm_heads`.
    """

    token_map: Tensor | None
    lm_head_weight: Any  # [M, V_draft, H], or None
    lm_head_bias: Any  # [M, V_draft], or None

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        bias: bool = True,
        lm_head_bias: bool = False,
        token_map: Tensor | None = None,
        *,
        num_lm_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_lm_heads is None:
            num_lm_heads = num_heads
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if token_map is None else token_map.shape[0]
        self.blocks = nn.ModuleList(
            ResBlock(hidden_size, bias, num_heads, device=device, dtype=dtype)
            for _ in range(num_layers)
        )
        shape = (num_lm_heads, self.draft_vocab_size)
        self.lm_head_weight = self.lm_head_bias = None
        if num_lm_heads:
            weight = torch.zeros(*shape, hidden_size, device=device, dtype=dtype)
            self.lm_head_weight = nn.Parameter(weight)  # [M, V_draft, H]
        if lm_head_bias:
            self.lm_head_bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
        if token_map is not None:
            token_map = token_map.to(device=device, dtype=torch.int64)
        self.register_buffer("token_map", token_map)

    @property
    def num_lm_heads(self) -> int:
        """M: K, 1, or 0 if the target's LM head is used."""
        return 0 if self.lm_head_weight is None else self.lm_head_weight.shape[0]

    @property
    def shared_lm_head(self) -> bool:
        """Whether the target's LM head is used."""
        return self.lm_head_weight is None

    def store_lm_head(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store the target's rows of the draft vocabulary as one LM head for all heads.

        ``weight`` is [V_draft, H], ``bias`` [V_draft]. For inference with heads that store none: no
        other rows of the target's LM head are read from then on.
        """
        self.lm_head_weight = nn.Parameter(weight.detach()[None], requires_grad=False)
        if bias is not None:
            self.lm_head_bias = nn.Parameter(bias.detach()[None], requires_grad=False)

    @torch.no_grad()
    def init_lm_heads(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy the target's LM head (weight [>= vocab_size, H], bias [>= vocab_size]) into these.

        While the residual layers are zero, every head then outputs the target's logits.
        """
        rows = slice(self.vocab_size) if self.token_map is None else self.token_map
        self.lm_head_weight.copy_(weight[rows])
        if bias is not None:
            self.lm_head_bias.copy_(bias[rows])

    def keep_vocabulary(self, rows: slice) -> None:
        """Keep ``rows`` of the stored LM heads and drop the others, for inference on one rank.

        Logits are [B, K, len(rows)] from then on: the columns of a tensor-parallel rank.
        """
        for name in ("lm_head_weight", "lm_head_bias"):  # [M, V_draft, H], [M, V_draft]
            whole = getattr(self, name)
            if whole is not None:  # copied, so that the other rows are freed
                part = whole.detach()[:, rows].clone()
                setattr(self, name, nn.Parameter(part, requires_grad=False))

    def forward(
        self, hidden_states: Tensor, num_heads: int | None = None, path: Tensor | None = None
    ) -> Tensor:
        """Residual layers of the first ``num_heads`` heads: [B, H] -> [B, K, H].

        ``path`` is for heads that depend on the preceding tokens (`HydraHeads`).
        """
        k = self.num_heads if num_heads is None else num_heads
        x = hidden_states
        for block in self.blocks:
            x = block(x, k)
        return x if x.dim() == 3 else x.unsqueeze(1).expand(-1, k, -1)

    def compute_logits(self, x: Tensor, lm_head: LMHead | None = None, first: int = 0) -> Tensor:
        """Logits over the draft vocabulary: x [B, k, H] of k heads -> [B, k, V_draft].

        ``first`` is the first of the heads. ``lm_head`` maps [B * k, H] to the target's logits
        [B * k, >= vocab_size], all of them on every rank; it is required by, and only used by,
        heads that store no LM head, in a single product for all heads.
        """
        batch, k, _ = x.shape
        if self.lm_head_weight is None:
            if lm_head is None:
                raise HeadsError("these heads share the target's LM head: pass lm_head")
            logits = lm_head(x.flatten(0, 1))[:, : self.vocab_size]  # [B * k, V]
            if self.token_map is not None:
                logits = logits.index_select(1, self.token_map)
            return logits.unflatten(0, (batch, k))
        own = slice(0, 1) if self.num_lm_heads == 1 else slice(first, first + k)
        weight = self.lm_head_weight[own]
        bias = None if self.lm_head_bias is None else self.lm_head_bias[own]
        if len(weight) == 1:
            return F.linear(x, weight[0], None if bias is None else bias[0])
        return _per_head_linear(x, weight, bias)


def _per_head_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B, K, I] x [K, O, I] (+ [K, O]) -> [B, K, O], head by head, in one kernel."""
    rows, columns = x.transpose(0, 1), weight.transpose(1, 2)  # [K, B, I], [K, I, O]
    if bias is None:
        return torch.bmm(rows, columns).transpose(0, 1)
    return torch.baddbmm(bias.unsqueeze(1), rows, columns).transpose(0, 1)
