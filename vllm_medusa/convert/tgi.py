"""Text Generation Inference: v1's or v2's names in ``medusa_lm_head.safetensors``.

Its loader (``layers/medusa.py``) takes biases of the layers for granted and LM heads without. Heads
on the target's LM head it knows only with one layer. A config with "architectures" would be taken
for another kind of speculator.
"""

from __future__ import annotations

from vllm_medusa.convert import v1
from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.target import TargetWeights

FILE = "medusa_lm_head.safetensors"


def write(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads for TGI, with copies of the LM head where it can't share the target's."""
    if heads.lm_heads or heads.num_layers != 1:
        return v1.write(heads, target, "TGI", FILE)
    heads.refuse_token_map("TGI")
    heads = heads.with_biases()
    return Output(FILE, v1.spelled(heads), heads.config(v1.keys(heads)), heads.notes)
