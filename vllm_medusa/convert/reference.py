"""The reference's names, by the places of tensors in its modules, and the formats that use them.

v1, what the reference's loader reads: a head is its ``nn.Sequential`` of residual blocks (their
linear layers have biases) and an LM head without one. Its config does not say the sizes, which come
from the target's. v2 has the residual blocks alone. Stock vLLM 0.32 reads v2 too and leaves its LM
heads at random: give it the format vllm.

TGI's loader (``layers/medusa.py``) takes biases of the layers for granted and LM heads without.
Heads on the target's LM head it knows only with one layer. A config with "architectures" would be
taken for another kind of speculator. TensorRT-LLM (``models/medusa/{config,weight}.py``) wants
biases and an LM head for every head.
"""

from __future__ import annotations

from typing import Any

from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.heads.formats import v1_name
from vllm_medusa.heads.model import HeadsError

PICKLE, SAFETENSORS = "medusa_lm_head.pt", "medusa_lm_head.safetensors"


def write_v1(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads as v1, with copies of the LM head if they share one."""
    return _output(PICKLE, _with_own_lm_heads(heads, target, "v1"))


def write_v2(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads as v2; LM heads of their own are refused unless they are the target's."""
    heads.refuse_token_map("v2")
    heads = heads.without_lm_heads(target)
    if not heads.num_layers:
        raise HeadsError(f"{heads.label} has no residual layers: in v2 nothing would be left of it")
    return _output(SAFETENSORS, heads.with_biases(), version="2")


def write_tgi(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads for TGI, with copies of the LM head where it can't share the target's."""
    if heads.lm_heads or heads.num_layers != 1:
        return _output(SAFETENSORS, _with_own_lm_heads(heads, target, "TGI"))
    heads.refuse_token_map("TGI")
    return _output(SAFETENSORS, heads.with_biases())


def write_tensorrt_llm(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads for TensorRT-LLM, with copies of the LM head if they share one."""
    heads = _with_own_lm_heads(heads, target, "TensorRT-LLM")
    return _output(PICKLE, heads, num_medusa_heads=heads.num_heads)


def _with_own_lm_heads(heads: Heads, target: TargetWeights | None, name: str) -> Heads:
    heads.refuse_token_map(name)
    heads.refuse_lm_head_bias(name)
    return heads.with_biases().with_own_lm_heads(target)


def _output(file: str, heads: Heads, **own: Any) -> Output:
    """Tensors and config in the reference's words; the sizes are for readers that take them."""
    tensors = {v1_name(name, heads.num_layers): tensor for name, tensor in heads.tensors.items()}
    own |= {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    sizes = {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size}
    own |= {key: value for key, value in sizes.items() if value is not None}
    return Output(file, tensors, heads.config(own), heads.notes)
