"""Changes to the target that vLLM loads: its checkpoint, its LM head, its LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_medusa.heads.formats import is_head_tensor
from vllm_medusa.heads.model import MedusaHeads

_CHANNELS = 64  # channels of the LM head per chunk


def heads_left_out() -> Any:
    """A context in which vLLM's loader skips the heads in a full Medusa-2 checkpoint."""
    original = DefaultModelLoader.get_all_weights

    def get_all_weights(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in original(self, *args, **kwargs):
            if not is_head_tensor(name):
                yield name, tensor

    return patch.object(DefaultModelLoader, "get_all_weights", get_all_weights)


def adapted_heads(target: nn.Module) -> list[LogitsProcessorWithLoRA]:
    """The target's LM heads that adapters may modify; empty without LoRA."""
    return [layer for layer in target.modules() if isinstance(layer, LogitsProcessorWithLoRA)]


def unwrap_adapted(drafter: nn.Module) -> None:
    """Let a drafter use the layers that it shares with the target without adapters.

    An adapted layer looks up the adapter of each row of a step, but a drafter has other rows.
    """
    for module in list(drafter.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, BaseLayerWithLoRA):
                setattr(module, name, layer.base_layer)


@contextmanager
def adapters_left_out(heads: list[LogitsProcessorWithLoRA]) -> Iterator[None]:
    """Within the block, heads use the target's own LM head without adapters.

    The adapted LM head looks up the adapter of each row of a step, but heads have other rows.
    """

    def forward(processor: LogitsProcessor, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        return processor(getattr(lm_head, "base_layer", lm_head), *args, **kwargs)

    for head in heads:
        head.forward = partial(forward, head.base_layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for head in heads:
            del head.forward


def name_rows(heads: list[LogitsProcessorWithLoRA], logits_indices: Tensor) -> None:
    """Set the adapter of each row of the LM heads in this step: the rows at ``logits_indices``.

    vLLM's V2 runner sets one row per request, but a tree has more.
    """
    for wrapper in {id(head.punica_wrapper): head.punica_wrapper for head in heads}.values():
        adapters = wrapper.token_lora_indices[logits_indices]
        wrapper.indices_len[1] = len(adapters)
        wrapper.sampler_indices.copy_(adapters)
        if hasattr(wrapper, "prompt_mapping_meta"):  # read by the CUDA kernels
            wrapper.prompt_mapping_meta.prepare_tensors(wrapper.sampler_indices)


@torch.no_grad()
def store_target_rows(
    heads: MedusaHeads, target: Any, device: torch.device, dtype: torch.dtype
) -> float | None:
    """Store the rows of the draft vocabulary in heads that share the target's LM head.

    The logits of unit vectors are the LM head's columns, in any storage of the target: sharded
    across ranks, packed or quantized, with scaled or biased logits. A soft cap is not in the rows:
    it is returned, to be applied to their logits.
    """
    assert heads.token_map is not None
    size, token_map = heads.hidden_size, heads.token_map.to(device)
    with _without_soft_cap(target) as soft_cap:
        zero = torch.zeros(1, size, dtype=dtype, device=device)
        bias = target.compute_logits(zero)[0, token_map].float()
        columns = [
            target.compute_logits(unit)[:, token_map].float() - bias
            for unit in torch.eye(size, dtype=dtype, device=device).split(_CHANNELS)
        ]
    weight = torch.cat(columns).T.to(heads.token_map.device, dtype).contiguous()
    heads.store_lm_head(weight, bias.to(weight) if bool(bias.any()) else None)
    return soft_cap


@contextmanager
def _without_soft_cap(target: nn.Module) -> Iterator[float | None]:
    """Disable the cap c of ``c * tanh(logits / c)`` within the block; yields c."""
    capped = [
        (module, module.soft_cap)
        for module in target.modules()
        if isinstance(module, LogitsProcessor) and module.soft_cap is not None
    ]
    for processor, _ in capped:
        processor.soft_cap = None
    try:
        yield next((cap * processor.scale for processor, cap in capped), None)
    finally:
        for processor, cap in capped:
            processor.soft_cap = cap
