"""Random Hydra heads, and their output for one path, computed by definition."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from support.models import HIDDEN, VOCAB, fitted_lm_head, random_ranks
from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.training.losses import draft_labels


def random_hydra(
    num_heads: int = 4,
    num_layers: int = 2,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    *,
    own: bool = False,
    token_map: Tensor | None = None,
    std: float = 0.2,
) -> HydraHeads:
    """Heads with random weights, with their own LM heads or the target's."""
    generator = torch.Generator().manual_seed(4)
    count = num_heads if own else 0
    heads = HydraHeads(
        *(num_heads, num_layers, hidden, vocab),
        num_lm_heads=count,
        lm_head_bias=own,
        token_map=token_map,
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=std, generator=generator)
    return heads.requires_grad_(False)


def save_fitted_hydra(
    folder: Path,
    embedding: Tensor,  # [V, H], the target's
    states: Tensor,  # [M, H], the target's last hidden states; M below H
    paths: Tensor,  # int64 [M, K + 1], the tokens that follow each
    lm_head: Tensor | None = None,  # [V, H], the target's, for heads that store none
    token_map: Tensor | None = None,  # draft vocabulary; drafts of other tokens are wrong
) -> str:
    """Save heads with memorized continuations, at random ranks, only along the true path."""
    vocab, hidden = embedding.shape
    count = paths.shape[1] - 1
    generator = torch.Generator().manual_seed(2)
    num_lm_heads = count if lm_head is None else 0
    heads = HydraHeads(count, 1, hidden, vocab, num_lm_heads=num_lm_heads, token_map=token_map)
    heads.use_target_embedding(embedding)
    with torch.no_grad():
        for first in heads.inputs:
            first.skip_weight.normal_(std=first.skip_weight.shape[1] ** -0.5, generator=generator)
            first.skip_weight[:, hidden:] *= 10  # embeddings are smaller than states
        features = heads(states, count, paths[:, :-1])  # [M, K, H]
        for head, first in enumerate(heads.inputs):
            if lm_head is not None:
                rows = lm_head if token_map is None else lm_head[token_map]
                token = draft_labels(paths[:, head + 1], heads, 0)
                wanted = random_ranks(token, len(rows), 2, generator)
                wanted = torch.where(wanted >= 1, 5.5 + wanted / 2, wanted)  # confident enough
                states_of = torch.linalg.lstsq(rows.double(), wanted.T).solution.T  # [M, H]
                fitted = torch.linalg.lstsq(features[:, head].double(), states_of).solution.T
                first.skip_weight.copy_(fitted @ first.skip_weight.double())
                continue
            fitted = fitted_lm_head(features[:, head], paths[:, head + 1], vocab, 2, generator)
            heads.lm_head_weight[head].copy_(fitted)
    save_heads(folder, heads)
    return str(folder)


def dense_logits(
    heads: HydraHeads, state: Tensor, tokens: list[int], embedding: Tensor, lm_head: Tensor
) -> Tensor:
    """Logits [V_draft] of the token after the path x_1 .. x_n, by head n - 1, step by step."""
    head, x = len(tokens) - 1, torch.cat([state, *(embedding[token] for token in tokens)])
    first = heads.inputs[head]
    x = first.skip_weight @ x + first.skip_bias + F.silu(first.weight @ x + first.bias)
    for block in heads.blocks:
        x = x + F.silu(block.weight[head] @ x + block.bias[head])
    if heads.lm_head_weight is None:
        return lm_head[slice(None) if heads.token_map is None else heads.token_map] @ x
    return heads.lm_head_weight[head] @ x + heads.lm_head_bias[head]
