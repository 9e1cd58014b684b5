"""With vLLM, where it is installed: the demo's target with and without trees, on this GPU.

Tokens are compared in fp32, at temperature 0 and seeded at 0.8; there they must be equal. Speed is
of the tiny demo model, so it tells whether the engine works, not what a real model gains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.cases import Case, Lab, NotHere, Record
from benchmarks.report import ROOT

PROMPTS = 8
TOKENS = 96
SECONDS = 240
_ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    llm = LLM(**asked["engine"])
    found = {}
    for temperature in asked["temperatures"]:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=asked["tokens"])
        llm.generate(asked["prompts"][:1], params, use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(asked["prompts"], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        found[str(temperature)] = {"ids": ids, "seconds": seconds}
    print("FOUND" + json.dumps(found))
"""


def cases(small: bool) -> list[Case]:
    """The engine as it starts by default, and without CUDA graphs."""
    return [
        Case("demo, CUDA graphs", partial(compare, False)),
        Case("demo, eager", partial(compare, True)),
    ]


def compare(eager: bool, lab: Lab) -> Record:
    """Plain vLLM and vLLM with trees, each in a process of its own."""
    if find_spec("vllm") is None:
        raise NotHere("vLLM is not installed")
    lines = (ROOT / "demo/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    engine: dict[str, Any] = {
        "model": str(ROOT / "demo/target"),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": eager,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.3,
    }
    asked = {
        "engine": engine,
        "prompts": [json.loads(line)["prompt"] for line in lines[:PROMPTS]],
        "temperatures": [0.0, 0.8],
        "tokens": TOKENS,
    }
    plain = generate(asked)
    medusa = {"method": "medusa", "model": str(ROOT / "demo/heads")}
    tree = generate(asked | {"engine": engine | {"speculative_config": medusa}})
    record: Record = {"prompts": PROMPTS, "tokens": TOKENS, "dtype": "float32", "passed": True}
    for temperature, found in plain.items():
        other = tree[temperature]
        equal = sum(a == b for a, b in zip(found["ids"], other["ids"], strict=True))
        record["passed"] &= equal == PROMPTS
        record[f"temperature {temperature}"] = {
            "identical": equal,
            "plain_tokens_per_s": sum(map(len, found["ids"])) / found["seconds"],
            "tree_tokens_per_s": sum(map(len, other["ids"])) / other["seconds"],
        }
    return record


def generate(asked: Record) -> Record:
    """Token ids and seconds by temperature, from an engine in a process of its own."""
    command = [sys.executable, "-c", _ENGINE, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error:" in line]
        raise RuntimeError("the engine failed: " + "\n".join((*errors[:3], done.stderr[-3000:])))
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: Record = json.loads(line.removeprefix("FOUND"))
    return found
