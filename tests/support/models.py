"""Tiny random models that never settle into a loop, and heads for them.

A model that loops hides wrong KV: its next token hardly depends on the context. A large
initialisation makes every token depend on everything before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads import MedusaHeads, save_heads

VOCAB = 512
HIDDEN = 64
STOPS = (1, 50, 100, 150, 200, 250, 300, 350)  # end tokens a chaotic model often meets
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def save_model(folder: Path, architecture: str, **changes: Any) -> str:
    """Save a random model of a transformers architecture such as ``"Llama"``; returns its path."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**COMMON | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.float32)
    model.save_pretrained(folder)
    return str(folder)


def save_random_heads(
    folder: Path, num_heads: int = 4, hidden: int = HIDDEN, vocab: int = VOCAB
) -> str:
    """Save heads whose residual layers are random; they share the target's LM head."""
    torch.manual_seed(1)
    heads = MedusaHeads(num_heads, 1, hidden, vocab, shared_lm_head=True)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.05)
    save_heads(folder, heads)
    return str(folder)
