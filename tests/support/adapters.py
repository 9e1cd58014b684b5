"""Targets of several families, and adapters that resemble trained ones."""

from typing import Any

import torch

from vllm_medusa.training import lora

FAMILIES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen": ("Qwen3", {}),
    "qwen, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma, tied": ("Gemma2", {"tie_word_embeddings": True}),  # with a soft cap
    "phi, lm_head with bias": ("Phi", {"head_dim": None, "num_key_value_heads": 4}),
}


def disturb(adapted: Any, scale: float = 0.02) -> None:
    """Make every matrix of the adapter nonzero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(adapted).values():
            parameter.add_(torch.randn_like(parameter) * scale)
