"""Parts of vLLM's EAGLE-3 drafter: weights and cache, as the CPU kernel reads them, and layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_medusa.proposer.eagle import EagleCache, EagleWeights
from vllm_medusa.scorer.layout import CacheLayout


def eagle_weights(model: Any, token_map: Tensor | None) -> EagleWeights | None:
    """The weights of a loaded drafter; None if the kernel does not support it.

    A linear layer's weight is computed as its product with the identity, because vLLM may keep only
    a packed copy.
    """
    if type(model) is not Eagle3LlamaForCausalLM or model.model.norm.weight.device.type != "cpu":
        return None
    inner, logits = model.model, model.logits_processor
    layer, rope = inner.layers[0], inner.layers[0].self_attn.rotary_emb
    table = getattr(rope, "cos_sin_cache", None)
    if (
        get_tensor_model_parallel_world_size() > 1
        or len(inner.layers) != 1
        or inner.quant_config is not None
        or layer.self_attn.qkv_proj.bias is not None
        or layer.mlp.down_proj.bias is not None
        or not getattr(rope, "is_neox_style", False)
        or table is None
        or table.shape[1] != layer.self_attn.head_dim
        or logits.soft_cap is not None
        or not isinstance(model.lm_head.quant_method, UnquantizedEmbeddingMethod)
    ):
        return None

    def weight(linear: Any, inputs: int) -> Tensor:
        identity = torch.eye(inputs, dtype=inner.norm.weight.dtype)
        found: Tensor = linear.quant_method.apply(linear, identity, None)
        return found.t()

    norms: list[Any] = []
    if inner.use_aux_hidden_state:
        norms = [inner.input_norm] if inner.norm_before_fc else [*(inner.fc_norm or ())]
    attention, hidden = layer.self_attn, len(inner.norm.weight)
    return EagleWeights(
        fc=weight(inner.fc, inner.fc_input_size) if inner.use_aux_hidden_state else None,
        qkv=weight(attention.qkv_proj, 2 * hidden),
        out=weight(attention.o_proj, attention.q_size),
        gate_up=weight(layer.mlp.gate_up_proj, hidden),
        down=weight(layer.mlp.down_proj, layer.mlp.down_proj.input_size),
        lm_head=model.lm_head.weight[: model.config.draft_vocab_size] * logits.scale,
        embedding_norm=layer.input_layernorm.weight,
        state_norm=layer.hidden_norm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        last_norm=inner.norm.weight,
        rope=table,
        embedding=inner.embed_tokens.weight,
        token_map=token_map,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        eps=inner.norm.variance_epsilon,
        norm_before_residual=getattr(inner.config, "norm_before_residual", False),
        norm_output=inner.norm_output,
        fc_norms=tuple(norm.weight for norm in norms),
    )


def entry_layer(model: Any) -> Any:
    """The only layer of a loaded EAGLE-3 drafter; None if it has several, or is another drafter."""
    if type(model) is not Eagle3LlamaForCausalLM or len(model.model.layers) != 1:
        return None
    (layer,) = model.model.layers
    return layer if type(layer.self_attn) is LlamaAttention else None


def eagle_cache(layer: Any) -> EagleCache | None:
    """The cache of its attention layer; None if the kernel does not support it."""
    if not hasattr(layer, "isa"):  # not vLLM's CPU backend
        return None
    from vllm_medusa.integration.cpu_attention import kernel_truncates

    layout = CacheLayout.of(layer.kv_cache, layer.isa)
    window = max(layer.impl.sliding_window, 0)
    return EagleCache.of(layer.kv_cache, layout, truncate=kernel_truncates(), window=window)
