"""Compiles all our kernels before the first request.

vLLM's warm-up runs whole trees, plain decodes and both together with short contexts. This adds
trees with prefill, long contexts (split in parts), typical acceptance and truncated trees.
"""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.integration.attention import platform_attention
from vllm_medusa.integration.request_trees import RequestTrees
from vllm_medusa.sampler import launch
from vllm_medusa.scorer.step import Trees as TreesOf


@torch.inference_mode()
def warm_up(runner: Any) -> None:
    """Compile for a V2 runner whose model and KV cache are ready, if the platform compiles.

    All ranks must call it, because drafting exchanges candidates.
    """
    attention, speculator = platform_attention(), runner.speculator
    if not hasattr(attention, "warm_up"):
        return
    layers = runner.vllm_config.compilation_config.static_forward_context
    attention.warm_up(layers, chain.from_iterable(runner.attn_groups))
    drafter_groups = chain.from_iterable(speculator.attn_groups)  # none without a KV cache
    attention.warm_up(layers, drafter_groups, branches=True)
    model, device = runner.model_config, runner.device
    two = torch.zeros(2, model.get_hidden_size(), dtype=model.dtype, device=device)
    logits = runner.model.compute_logits(two)
    trees: RequestTrees = speculator.trees
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    warm_up_rules(functools.partial(trees.topologies, slot), trees.num_nodes, logits)
    speculator.warm_up()
    if trees.lookup is not None:
        speculator.warm_up_lookup(runner.req_states.all_token_ids.gpu)


def warm_up_rules(trees: TreesOf, nodes: int, logits: Tensor) -> None:
    """Compile both acceptance rules, for one whole tree and for steps of truncated trees only.

    ``logits`` [2, V] are the target's. If they need no processing (temperature 1), the
    rules get them unchanged, in their dtype and with padding after each row. Otherwise they get
    vLLM's copy in fp32, which has no padding unless it is a single row.
    """
    device = logits.device
    one = torch.ones(1, device=device)
    for width in (*(n for n in (16, 32, 64, 128, 192) if n < nodes), nodes):
        tree = trees(width, torch.ones(1, dtype=torch.int64, device=device))
        ids = torch.zeros(1, width, dtype=torch.int64, device=device)
        launch.target_verdict(tree, ids, ids)
        for rows in (logits[:1], logits):
            for given in (rows, torch.empty_like(rows, dtype=torch.float32).copy_(rows)):
                launch.typical_path(tree, ids, given, ids, one, one)
