"""Generate with Medusa trees: one engine, a few prompts.

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
    """Generate and print continuations of the prompts."""
    llm = LLM(
        model=TARGET,
        dtype="float32",
        gpu_memory_utilization=0.5,  # on CPUs, vLLM's default of 0.92 is rarely free
        speculative_config={
            "method": "medusa",
            "model": HEADS,
            # By default the number of draft nodes adapts to each step. A number fixes it.
            "budget": "auto",
            # "lossless" (default: the same tokens as plain vLLM) or "typical".
            "acceptance": "lossless",
        },
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=64)
    for output in llm.generate(PROMPTS, params):
        print(output.prompt, output.outputs[0].text, sep="", end="\n\n")


if __name__ == "__main__":
    main()
