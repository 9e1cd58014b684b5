"""Medusa-1: heads on a frozen target (https://arxiv.org/abs/2401.10774, section 2.2.1).

    loss = sum over k = 1 ... K of decay^k * mean cross-entropy of head k at t + k + 1

The target does not change, so its hidden states are computed once (`hidden_cache`), and a step only
runs the heads. Positions are independent, so a step takes short pieces of many texts. Hydra
heads are trained in the same way, each with the tokens before its own as input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.checkpoint import new_heads as make_heads
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.method import Batch, Method
from vllm_medusa.training.options import HeadOptions
from vllm_medusa.training.target import Target

PIECE_ROWS = 32  # a step of 256 positions has parts of eight texts


class Medusa1(Method):
    """Trains Medusa or Hydra heads."""

    heads: MedusaHeads

    def __init__(self, target: Target, heads: MedusaHeads, *setup: Any) -> None:
        super().__init__(heads, *setup)
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.lm_head = self.teacher = target.lm_head_of(heads.token_map, dtype)
        if self.soft and heads.token_map is not None:
            self.teacher = target.lm_head_of(dtype=dtype)

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Method`; only Hydra heads use the tokens before their own."""
        last = self.states(batch)
        return last, self.heads(last, path=self.path(batch))


def new_heads(
    target: Target,
    options: HeadOptions,
    token_map: Tensor | None = None,  # int64 [V_draft], token ids to score; None: all
) -> MedusaHeads:
    """Create fp32 heads on the LM head's device, each of which outputs the target's own logits.

    ``lm_heads`` "own" gives every head a trainable copy of the target's (paper, section 2.1.1),
    bias and logit scale included. Copies omit a soft cap: it does not change
    rankings.
    """
    own, bias = options.own_lm_heads, target.lm_head_bias
    heads = make_heads(
        options.kind == "hydra",
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_lm_heads=options.num_heads if own else 0,
        lm_head_bias=own and bias is not None,
        token_map=token_map,
        device=target.lm_head_weight.device,
        dtype=torch.float32,
    )
    if isinstance(heads, HydraHeads):
        heads.use_target_embedding(target.embedding_weight)
    if own:
        weight, scale = target.lm_head_weight.float(), target.logit_scale
        heads.init_lm_heads(weight * scale, None if bias is None else bias.float() * scale)
    return heads


def load_for(target: Target, files: CheckpointFiles, dtype: torch.dtype) -> MedusaHeads:
    """Load a target's Medusa or Hydra heads, on its device."""
    heads, _ = load_heads(
        files,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=target.device,
    )
    if isinstance(heads, HydraHeads):
        heads.use_target_embedding(target.embedding_weight)
    return heads
