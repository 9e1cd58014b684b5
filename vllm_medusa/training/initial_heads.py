"""Heads before training: every one of them gives the target's own logits."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.losses import LMHead
from vllm_medusa.training.target import Target


def new_heads(
    target: Target,
    num_heads: int,
    num_layers: int,
    *,
    lm_heads: str = "shared",
    token_map: Tensor | None = None,  # int64 [V_draft], the token ids that are scored; None: all
    kind: str = "medusa",  # or "hydra"
) -> MedusaHeads:
    """Make fp32 heads for ``target``, on its LM head's device, with residual layers of zero.

    ``lm_heads`` "shared" uses the target's; "own" gives every head a copy of it to train (paper,
    section 2.1.1), bias included and the logits' scale multiplied in. A soft cap stays out of
    copies: it changes no ranking.
    """
    own = lm_heads == "own"
    weight, bias = target.lm_head_weight, target.lm_head_bias
    if kind == "hydra":
        hydra = HydraHeads(
            num_heads,
            num_layers,
            target.hidden_size,
            target.vocab_size,
            num_lm_heads=num_heads if own else 0,
            lm_head_bias=own and bias is not None,
            token_map=token_map,
            device=weight.device,
            dtype=torch.float32,
        )
        hydra.use_target_embedding(target.embedding_weight)
        return _with_lm_heads(hydra, target)
    heads = MedusaHeads(
        num_heads,
        num_layers,
        target.hidden_size,
        target.vocab_size,
        shared_lm_head=not own,
        lm_head_bias=own and bias is not None,
        token_map=token_map,
        device=weight.device,
        dtype=torch.float32,
    )
    return _with_lm_heads(heads, target)


def _with_lm_heads(heads: MedusaHeads, target: Target) -> MedusaHeads:
    if not heads.shared_lm_head:
        weight, bias, scale = target.lm_head_weight, target.lm_head_bias, target.logit_scale
        heads.init_lm_heads(weight.float() * scale, None if bias is None else bias.float() * scale)
    return heads


def target_lm_head(
    target: Target, token_map: Tensor | None = None, dtype: torch.dtype | None = None
) -> LMHead:
    """The target's LM head over the tokens of ``token_map``, whose rows are gathered once, or all.

    ``dtype`` None keeps the LM head's own.
    """
    rows = slice(None) if token_map is None else token_map
    weight = target.lm_head_weight.detach()[rows]
    weight = weight if dtype is None else weight.to(dtype)
    bias = target.lm_head_bias
    bias = None if bias is None else bias.detach()[rows].to(weight.dtype)

    def lm_head(x: Tensor) -> Tensor:
        return target.shape_logits(torch.nn.functional.linear(x.to(weight.dtype), weight, bias))

    return lm_head
