"""v2: ``medusa_lm_head.safetensors`` with the residual blocks alone; the target's LM head is used.

Stock vLLM 0.32 reads such files too and leaves its LM heads at random: give it the format vllm.
"""

from __future__ import annotations

from vllm_medusa.convert import v1
from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.target import TargetWeights
from vllm_medusa.heads.model import HeadsError

FILE = "medusa_lm_head.safetensors"


def write(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads as v2; LM heads of their own are refused unless they are the target's."""
    heads.refuse_token_map("v2")
    heads = heads.without_lm_heads(target)
    if not heads.num_layers:
        raise HeadsError(f"{heads.label} has no residual layers: in v2 nothing would be left of it")
    heads = heads.with_biases()
    config = heads.config({"version": "2", **v1.keys(heads)})
    return Output(FILE, v1.spelled(heads), config, heads.notes)
