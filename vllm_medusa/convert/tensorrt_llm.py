"""TensorRT-LLM: v1's file; its config also says how many heads there are under its own name.

See ``tensorrt_llm/models/medusa/{config,weight}.py``: every head needs biases and an LM head.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_medusa.convert import v1
from vllm_medusa.convert.heads import Heads, Output
from vllm_medusa.convert.target import TargetWeights


def write(heads: Heads, target: TargetWeights | None) -> Output:
    """Spell heads for TensorRT-LLM, with copies of the LM head if they share one."""
    output = v1.write(heads, target, "TensorRT-LLM")
    return replace(output, config={"num_medusa_heads": heads.num_heads, **output.config})
