"""Run vLLM's small `torch.compile` functions without compiling them.

vLLM compiles them even in eager engines, which takes each process ten seconds.
"""

from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.v1.sample import sampler


def use_uncompiled() -> None:
    for module, name in (
        (sampler, "batched_count_greater_than"),
        (embedding, "get_masked_input_and_mask"),
    ):
        function = getattr(module, name)
        setattr(module, name, getattr(function, "_torchdynamo_orig_callable", function))
