"""Parts of vLLM's EAGLE-3 drafter: its layer, and its weights and cache for the CPU kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_medusa.proposer.eagle_cpu import EagleCache, EagleWeights
from vllm_medusa.scorer.layout import CacheLayout


def eagle_weights(model: Any, token_map: Tensor | None) -> EagleWeights | None:
    """The weights of a loaded drafter; None if the kernel does not support it."""
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

    norms: list[Any] = []
    if inner.use_aux_hidden_state:
        norms = [inner.input_norm] if inner.norm_before_fc else [*(inner.fc_norm or ())]
    attention, hidden = layer.self_attn, len(inner.norm.weight)
    return EagleWeights(
        fc=_weight(inner.fc, inner.fc_input_size) if inner.use_aux_hidden_state else None,
        qkv=_weight(attention.qkv_proj, 2 * hidden),
        out=_weight(attention.o_proj, attention.q_size),
        gate_up=_weight(layer.mlp.gate_up_proj, hidden),
        down=_weight(layer.mlp.down_proj, layer.mlp.down_proj.input_size),
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


def _weight(linear: Any, inputs: int) -> Tensor:
    """A linear layer's weight [O, I]: its product with the identity, as it may be packed."""
    identity = torch.eye(inputs, dtype=linear.params_dtype)
    found: Tensor = linear.quant_method.apply(linear, identity, None)
    return found.t()


@dataclass(frozen=True, eq=False)
class EntryLayer:
    """The part of EAGLE-3's only layer that computes cache entries."""

    layer: Any  # vLLM's
    weight: Tensor  # [2 * kv_size, 2H], of keys and values
    bias: Tensor | None  # [2 * kv_size]

    def keys_and_values(self, positions: Tensor, embeds: Tensor, states: Tensor) -> list[Tensor]:
        """Rotated keys and values, [T, heads, D] each; int64 [T], [T, H], [T, H]."""
        attention = self.layer.self_attn
        inputs = torch.cat([self.layer.input_layernorm(embeds), self.layer.hidden_norm(states)], -1)
        key, value = functional.linear(inputs, self.weight, self.bias).chunk(2, -1)
        key = key.contiguous()
        query = torch.zeros_like(key)  # some rotary embeddings require one
        _, key = attention.rotary_emb(positions, query, key)
        shape = attention.num_kv_heads, attention.head_dim
        return [key.unflatten(-1, shape), value.unflatten(-1, shape)]


def entry_layer(model: Any) -> EntryLayer | None:
    """The only layer of a loaded EAGLE-3 drafter; None for quantized and other drafters."""
    if type(model) is not Eagle3LlamaForCausalLM:
        return None
    inner = model.model
    if len(inner.layers) != 1 or inner.quant_config is not None:
        return None
    (layer,) = inner.layers
    if type(layer.self_attn) is not LlamaAttention:
        return None
    projection, first = layer.self_attn.qkv_proj, layer.self_attn.q_size
    weight = projection.weight
    if inner.norm.weight.device.type == "cpu":
        weight = _weight(projection, 2 * len(inner.norm.weight))
    bias = projection.bias if projection.bias is None else projection.bias[first:]
    return EntryLayer(layer, weight[first:].contiguous(), bias)


def eagle_cache(layer: Any) -> EagleCache | None:
    """The cache of its attention layer; None if the kernel does not support it."""
    if not hasattr(layer, "isa"):  # not vLLM's CPU backend
        return None
    from vllm_medusa.integration.attention.cpu_attention import kernel_truncates

    layout = CacheLayout.of(layer.kv_cache, layer.isa)
    window = max(layer.impl.sliding_window, 0)
    return EagleCache.of(layer.kv_cache, layout, truncate=kernel_truncates(), window=window)
