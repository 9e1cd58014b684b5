"""Typical acceptance for the requests that select it, with vLLM's processed logits.

Their paths are chosen first, from the logits of all nodes. The walk then follows them, because its
sampler is given their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from vllm_medusa.integration.requests import TypicalRule
from vllm_medusa.integration.v1.history import needs_tokens, of_rows
from vllm_medusa.sampler import NO_TOKEN, close_path, typical_path
from vllm_medusa.scorer.step import TreeStep
from vllm_medusa.tree.batch import TreeBatch


def typical_paths(
    sampler: Sampler,
    logits: Tensor,  # [sum of num_nodes, V]
    step: TreeStep,
    metadata: SamplingMetadata,
    typical: TypicalRule,
) -> tuple[Tensor, Tensor]:
    """Choose the paths of the typical requests, with their rows processed as in plain decoding.

    Returns:
        tokens: int64 [B, D + 1], to emit; `NO_TOKEN`: sample this one (for typical requests only
            the last one, unless ``greedy_root``; for other requests all).
        drafts: int64 [B, N], those that the walk may accept; `NO_TOKEN`: not on the path of a
            typical request.

    """
    requests = typical.mask.nonzero().flatten()  # [Q]
    tree, token_ids = step.tree.select(requests), step.token_ids[requests]  # of the Q
    raw = logits[step.row_of_node[requests]]  # [Q, N, V]
    processed = _process(
        sampler, raw.flatten(0, 1), metadata, requests.tolist(), tree, token_ids
    ).view(*raw.shape)
    epsilon, delta = typical.epsilon[requests], typical.delta[requests]
    path = typical_path(tree, token_ids, processed.softmax(-1), epsilon, delta)
    likeliest = processed[torch.arange(len(requests)), path.last_node].argmax(-1)
    final = torch.where(typical.greedy_root[requests], likeliest, NO_TOKEN)
    tokens = close_path(path, token_ids, final).output_token_ids
    given = torch.full((step.batch_size, tokens.shape[1]), NO_TOKEN)
    off_path = torch.ones_like(token_ids, dtype=torch.bool).scatter(1, path.nodes, False)
    drafts = token_ids.masked_fill(off_path, NO_TOKEN)
    return (
        given.index_copy(0, requests, tokens),
        step.token_ids.index_copy(0, requests, drafts),
    )


def _process(
    sampler: Sampler,
    logits: Tensor,  # [Q * N, V]
    metadata: SamplingMetadata,
    chosen: list[int],  # the Q requests
    tree: TreeBatch,  # of the Q
    token_ids: Tensor,  # int64 [Q, N]
) -> Tensor:
    """Penalties, bans, temperature and truncation, applied row by row as in plain decoding."""
    owners = [request for request in chosen for _ in range(tree.max_nodes)]  # [Q * N]
    outputs = None
    if needs_tokens(metadata):
        drafts = zip(chosen, token_ids.clamp(min=0), tree.ancestors, strict=True)
        outputs = [  # a node's ancestors are its path, of which the root is already in the output
            [*metadata.output_token_ids[request], *ids[path][1:].tolist()]
            for request, ids, paths in drafts
            for path in paths
        ]
    per_row = of_rows(metadata, owners, outputs, tree.depths.flatten().tolist())
    per_row.thinking_budget_state_holder = None  # refused for typical requests
    logits = sampler.apply_logits_processors(logits.to(torch.float32, copy=True), per_row, False)
    logits = sampler.apply_temperature(logits, per_row.temperature, per_row.all_random)
    return apply_top_k_top_p(logits, per_row.top_k, per_row.top_p)
