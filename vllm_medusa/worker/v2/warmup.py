"""Compiles every kernel of ours before the first request, which else would wait for it.

vLLM's warm-up runs whole trees, plain decodes and both together over short contexts. Trees beside
prefill, long contexts (split over parts), typical acceptance and trees cut short come in here.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_medusa.tree import TreeBatch, TreeTensors
from vllm_medusa.worker.v2.platform import tree_backend
from vllm_medusa.worker.v2.rules import Rules


@torch.inference_mode()
def warm_up(runner: Any) -> None:
    """Compile for a V2 runner whose model and KV cache are there, if the platform compiles at all.

    Every rank does the same, since drafting exchanges candidates.
    """
    backend, speculator = tree_backend(), runner.speculator
    if backend.warm_up is None:
        return
    groups = (group for groups in runner.attn_groups for group in groups)
    backend.warm_up(runner.vllm_config.compilation_config.static_forward_context, groups)
    model, device = runner.model_config, runner.device
    warm_up_rules(Rules.of(device), speculator.trees.tensors, model.get_vocab_size(), device)
    for batch in (1, 16):  # strides of logits that are multiples of 16, or are not
        hidden = torch.zeros(batch, model.get_hidden_size(), dtype=model.dtype, device=device)
        speculator.drafter.propose(hidden)


def warm_up_rules(
    rules: Rules, tensors: TreeTensors, vocab_size: int, device: torch.device
) -> None:
    """Both rules, for whole trees and for steps in which all trees are cut."""
    nodes = tensors.num_nodes
    logits = torch.zeros(1, vocab_size, device=device)
    one = torch.ones(1, device=device)
    for width in (*(n for n in (16, 32, 64, 128, 192) if n < nodes), nodes):
        count = torch.ones(1, dtype=torch.int64, device=device)
        tree = TreeBatch.from_static(tensors.prefix(width), count)
        ids = torch.zeros(1, width, dtype=torch.int64, device=device)
        rules.walk(tree, ids, ids)
        rules.typical(tree, ids, logits, ids, one, one)
