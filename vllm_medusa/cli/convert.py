"""`vllm-medusa convert`: convert heads between formats."""

from __future__ import annotations

from vllm_medusa.cli.console import ConsoleProgress, invocation
from vllm_medusa.convert.options import ConvertOptions

TEXT = """\
Write heads, or an EAGLE-3 drafter, in another format. The source format, or a full Medusa-2 model,
is detected from its tensors. Tensors are copied unchanged, each in its own dtype; tensors that a
format does not support are refused, and missing ones are added and reported.
---
formats:
  native        this package's format: vLLM's layout with additional fields
  vllm          for vLLM without this plugin: with a copy of the target's LM head if it is shared
  v1            the reference's medusa_lm_head.pt: biases, an LM head for each head
  v2            the residual blocks alone; the target's LM head is used
  tgi           Text Generation Inference
  tensorrt-llm  TensorRT-LLM
for EAGLE-3 drafters (also native):
  safeailab     the reference's pytorch_model.bin
  specforge     SpecForge and SGLang; --target determines layer indices
  speculators   vLLM's speculators library"""


def run(options: ConvertOptions, progress: ConsoleProgress) -> int:
    """Convert, and print the result."""
    from vllm_medusa.convert.job import convert
    from vllm_medusa.heads.provenance import provenance

    done = convert(options, provenance=provenance(invocation()))
    info = done.info
    size = f"{done.bytes / 1e6:.1f} MB"
    if info is None:
        print(f"{done.file}: an EAGLE-3 drafter as {options.to}, {size}")
    else:
        print(
            f"{done.file}: {info.num_heads} heads of {info.num_layers} layers as {options.to} "
            f"(from {info.format}), {size}"
        )
    for note in done.notes:
        print(f"note: {note}")
    for warning in done.warnings:
        progress.warn(warning)
    return 0
