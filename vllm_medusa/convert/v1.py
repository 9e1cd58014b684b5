"""v1, what the reference's loader reads: ``medusa_lm_head.pt``, an LM head for each head.

A head is the reference's ``nn.Sequential`` of residual blocks (their linear layers have biases) and
an LM head without one; tensors are named by their places in it. Its config does not say the sizes,
which come from the target's.
"""

from __future__ import annotations

from typing import Any

from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.heads.formats import v1_name

FILE = "medusa_lm_head.pt"


def write(heads: Heads, target: TargetWeights | None, name: str = "v1", file: str = FILE) -> Output:
    """Spell heads as v1, with copies of the LM head if they share one."""
    heads.refuse_token_map(name)
    heads.refuse_lm_head_bias(name)
    heads = heads.with_biases().with_own_lm_heads(target)
    return Output(file, spelled(heads), heads.config(keys(heads)), heads.notes)


def spelled(heads: Heads) -> dict[str, Any]:
    """The tensors under the names of the reference's modules."""
    return {v1_name(name, heads.num_layers): tensor for name, tensor in heads.tensors.items()}


def keys(heads: Heads) -> dict[str, Any]:
    """The config's keys; the sizes are for readers that take them."""
    own = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    sizes = {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size}
    return own | {key: value for key, value in sizes.items() if value is not None}
