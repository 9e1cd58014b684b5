"""Generate with tree Medusa: one engine, a few prompts.

Run from a clone after `make setup`:

    .venv/bin/python examples/basic.py
"""

from __future__ import annotations

from vllm import LLM, SamplingParams

TARGET = "tests/assets/target"
HEADS = "tests/assets/heads"
PROMPTS = [
    "<s>import json\n\n\ndef read_settings(path):\n",
    '<s>class Queue:\n    """A queue with a limited size."""\n\n    def __init__(self, size):\n',
]


def main() -> None:
    """Print what the model continues the prompts with."""
    llm = LLM(
        model=TARGET,
        dtype="float32",
        gpu_memory_utilization=0.5,  # vLLM's default, 0.92, is rarely free on CPUs
        speculative_config={
            "method": "medusa",
            "model": HEADS,
            # Every step has the draft nodes that pay here. A number is that many for each request.
            "budget": "auto",
            # "lossless" (the default: exactly plain vLLM's tokens) or "typical".
            "acceptance": "lossless",
        },
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=64)
    for output in llm.generate(PROMPTS, params):
        print(output.prompt, output.outputs[0].text, sep="", end="\n\n")


if __name__ == "__main__":
    main()
