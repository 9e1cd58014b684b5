"""Compaction in the form a device has it: Triton where it runs, torch elsewhere."""

from __future__ import annotations

from torch import Tensor

from vllm_medusa.kernels import uses_kernel
from vllm_medusa.kv import layers
from vllm_medusa.kv.layers import LayerCaches


def compact_layers(
    caches: LayerCaches, slots: Tensor, path_nodes: Tensor, num_accepted: Tensor
) -> None:
    """`layers.compact_layers`: the same bits; neither waits for the device."""
    if not uses_kernel(slots.device.type):
        layers.compact_layers(caches, slots, path_nodes, num_accepted)
        return
    from vllm_medusa.kv import kernel

    kernel.compact_layers(caches, slots, path_nodes, num_accepted)
