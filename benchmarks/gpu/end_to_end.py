"""With vLLM, where it is installed: the demo's target with and without trees, on this GPU.

Tokens are compared in fp32, at temperature 0 and seeded at 0.8; there they must be equal. The
Triton attention of vLLM would round fp32 to TF32, ours never does; both engines are told not to.
Speed is of the tiny demo model, so it tells whether the engine works, not what a real model gains.

Once warm, no step with trees may compile a kernel of ours (vLLM says when one does) or wait for the
device in a line of ours (vLLM watches where `_WATCH` is set; only without graphs, so that nothing
that is timed is watched).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.case import ROOT
from benchmarks.gpu.cases import Case, Lab, NotHere, Record

PROMPTS = 8
TOKENS = 96
SECONDS = 240
_EXACT = {"TRITON_F32_DEFAULT": "ieee"}
_WATCH = {"VLLM_GPU_SYNC_CHECK": "warn"}
_ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    trees = "speculative_config" in asked["engine"]
    if trees:  # a checkout that isn't installed has no entry point
        from vllm_medusa.plugin import register
        register()
    llm = LLM(**asked["engine"])
    config = llm.llm_engine.vllm_config
    if trees != ("medusa" in (config.additional_config or {})):
        raise RuntimeError(f"trees were asked for: {trees}; {config.parallel_config.worker_cls=}")
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
    if lab.device == "cuda":  # ours stands in for it: else plain vLLM might take another
        engine["attention_backend"] = "TRITON_ATTN"
    asked = {
        "engine": engine,
        "prompts": [json.loads(line)["prompt"] for line in lines[:PROMPTS]],
        "temperatures": [0.0, 0.8],
        "tokens": TOKENS,
    }
    plain, _ = generate(asked)
    medusa = {"method": "medusa", "model": str(ROOT / "demo/heads")}
    with_trees = asked | {"engine": engine | {"speculative_config": medusa}}
    tree, output = generate(with_trees, _WATCH if eager else {})
    compiled, waits = compiled_late(output), waited(output)
    record: Record = {
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "dtype": "float32",
        "passed": not compiled & own_kernels() and not any("vllm_medusa" in at for at in waits),
        "compiled_late": sorted(compiled),
        "waited": sorted(waits),
    }
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


def generate(asked: Record, environment: dict[str, str] | None = None) -> tuple[Record, str]:
    """Token ids and seconds by temperature, from an engine in a process of its own; what it said.

    Raises:
        RuntimeError: The engine failed, or has trees where none were asked for, or the reverse.

    """
    command = [sys.executable, "-c", _ENGINE, json.dumps(asked)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **_EXACT, **(environment or {}), "PYTHONPATH": path},
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error:" in line]
        raise RuntimeError("the engine failed: " + "\n".join((*errors[:3], done.stderr[-3000:])))
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: Record = json.loads(line.removeprefix("FOUND"))
    return found, done.stdout + done.stderr


def compiled_late(output: str) -> set[str]:
    """Kernels that vLLM's monitor saw being compiled once the engine was warm."""
    return set(re.findall(r"compilation during inference: (?:\w+\.)*(\w+)", output))


def waited(output: str) -> set[str]:
    """Where (file and line) vLLM saw a step wait for the device."""
    return set(re.findall(r"(\S+\.py:\d+): UserWarning: .*synchron", output))


def own_kernels() -> set[str]:
    """The names of this package's kernels, from its sources."""
    files = (ROOT / "vllm_medusa").rglob("*.py")
    found = (re.findall(r"@triton\.jit.*?\ndef (\w+)", f.read_text(), re.DOTALL) for f in files)
    return {name for names in found for name in names}
