"""Generate with trees from the multi-token-prediction (MTP) module in a target's own checkpoint.

Run from a clone after `make setup`. MODEL is a folder or a hub name, for example
XiaomiMiMo/MiMo-7B-RL, which is downloaded (15 GB):

    .venv/bin/vllm-medusa inspect MODEL    # whether trees support its module
    .venv/bin/python examples/mtp.py MODEL
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

PROMPTS = [
    "import json\n\n\ndef read_settings(path):\n",
    'class Queue:\n    """A queue with a limited size."""\n\n    def __init__(self, size):\n',
]


def main(model: str) -> None:
    """Generate and print continuations of the prompts."""
    llm = LLM(
        model=model,
        trust_remote_code=True,  # MiMo has its own config class
        max_model_len=4096,
        gpu_memory_utilization=0.5,  # on CPUs, vLLM's default of 0.92 is rarely free
        disable_log_stats=False,  # for the metrics below
        # There is no "model": vLLM loads the module from the target's checkpoint. Without "tree",
        # vLLM's own MTP runs, with chains.
        speculative_config={"method": "mtp", "tree": "dynamic"},
    )
    params = SamplingParams(temperature=0.0, max_tokens=64)
    for output in llm.generate(PROMPTS, params):
        print(output.prompt, output.outputs[0].text, sep="", end="\n\n")
    count = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafts, accepted = (
        count[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
    )
    print(f"{accepted} draft tokens accepted in {drafts} steps with drafts")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
