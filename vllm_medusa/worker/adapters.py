"""LoRA adapters of the target's LM head, which looks up the adapter of each row of a step.

The heads draft with the target's own LM head, as they were trained; their rows are no rows of a
step. vLLM's V2 runner tells the LM head of one row for each request, and a tree has more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import LogitsProcessorWithLoRA


def adapted_heads(target: nn.Module) -> list[LogitsProcessorWithLoRA]:
    """The target's LM heads that adapters may change; none if the engine serves no adapters."""
    return [layer for layer in target.modules() if isinstance(layer, LogitsProcessorWithLoRA)]


@contextmanager
def adapters_left_out(heads: list[LogitsProcessorWithLoRA]) -> Iterator[None]:
    """Within the block the target's logits are those of its own LM head."""
    for head in heads:
        head.forward = _own(head)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for head in heads:
            del head.forward


def name_rows(heads: list[LogitsProcessorWithLoRA], logits_indices: Tensor) -> None:
    """Tell the LM heads which rows of the step they are given: those at ``logits_indices``."""
    for wrapper in {id(head.punica_wrapper): head.punica_wrapper for head in heads}.values():
        adapters = wrapper.token_lora_indices[logits_indices]
        wrapper.indices_len[1] = len(adapters)
        wrapper.sampler_indices.copy_(adapters)
        if hasattr(wrapper, "prompt_mapping_meta"):  # what kernels on CUDA read
            wrapper.prompt_mapping_meta.prepare_tensors(wrapper.sampler_indices)


def _own(head: LogitsProcessorWithLoRA) -> Any:
    def forward(lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        return head.base_layer(getattr(lm_head, "base_layer", lm_head), *args, **kwargs)

    return forward
