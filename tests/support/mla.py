"""A tiny chaotic DeepSeek: latent attention of the only size that vLLM's kernels for CPUs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models import STOPS, save_model

RANK, ROPE = 512, 64
SHAPE: dict[str, Any] = {
    "kv_lora_rank": RANK,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {  # vLLM's kernel for other RoPEs on CPUs is wrong for parts of a query
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def soften(model: Any) -> None:
    """Shrink the latents: otherwise attention selects one token each, and outputs loop."""
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.weight.fill_(0.35)


def save_deepseek(folder: Path, **changes: Any) -> str:
    """Save the model; returns its path."""
    settings: dict[str, Any] = {"eos_token_id": list(STOPS), **SHAPE, **changes}
    return save_model(folder, "DeepseekV2", tune=soften, **settings)
