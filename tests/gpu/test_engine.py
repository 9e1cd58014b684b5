"""With vLLM on a GPU: the demo's target with trees gives plain vLLM's tokens, greedy and seeded.

Tokens are compared in fp32. vLLM's Triton attention would round fp32 to TF32, unlike ours; both
engines disable this. The engines of one mode start concurrently, each in its own
process, so a mode takes as long as its slowest engine: `-k eager`, `-k graphs`, `-k compiled`.

After warm-up, no step with trees may compile one of our kernels (reported by vLLM)
or wait for the device in our code (vLLM watches configured regions; only when eager).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROMPTS, TOKENS = 8, 96
SECONDS = 480  # from the start of a mode's engines
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {},  # vLLM's defaults
}
TREES: dict[str, dict[str, Any]] = {
    "static": {"tree": "heads"},
    "seven": {"budget": 7},
    "automatic": {"budget": "auto"},
}
WATCH = {"VLLM_GPU_SYNC_CHECK": "warn"}
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    trees = "speculative_config" in task["engine"]
    if trees:  # a checkout that is not installed has no entry point
        from vllm_medusa.plugin import register
        register()
    llm = LLM(**task["engine"])
    config = llm.llm_engine.vllm_config
    if trees != ("medusa" in (config.additional_config or {})):  # vLLM has a Medusa of its own
        raise RuntimeError(f"trees were requested: {trees}; {config.parallel_config.worker_cls=}")
    found = {}
    for temperature in task["temperatures"]:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=task["tokens"])
        llm.generate(task["prompts"][:1], params, use_tqdm=False)
        outputs = llm.generate(task["prompts"], params, use_tqdm=False)
        found[str(temperature)] = [list(output.outputs[0].token_ids) for output in outputs]
    print("FOUND" + json.dumps(found))
"""


class Engine:
    """An engine in a separate process, which generates and exits."""

    def __init__(self, engine: dict[str, Any], folder: Path, **environment: str):
        lines = (ROOT / "tests/assets/prompts.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines[:PROMPTS]]
        task = {"engine": engine, "prompts": prompts, "temperatures": [0.0, 0.8]}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.output = folder / "output.txt"
        self.end = time.monotonic() + SECONDS
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, json.dumps(task | {"tokens": TOKENS})],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **EXACT,
                    **environment,
                    "PYTHONPATH": path,
                    "VLLM_CACHE_ROOT": str(folder),
                },
            )

    def wait(self) -> tuple[dict[str, Any], str]:
        """Token ids by temperature, and its output."""
        try:
            code: Any = self.process.wait(max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = f"still running after {SECONDS} s"
        said = self.output.read_text()
        assert code == 0, f"{code}: {said[-4000:]}"
        found = re.search(r"^FOUND(.*)$", said, re.MULTILINE)
        return json.loads(found[1]), said


@pytest.fixture(scope="module", params=MODES)
def engines(request: Any, tmp_path_factory: Any) -> Iterator[tuple[str, dict[str, Engine]]]:
    """All engines of a mode: plain vLLM's, and one per kind of tree."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    mode = request.param
    plain = MODES[mode] | {
        "model": str(ROOT / "tests/assets/target"),
        "dtype": "float32",
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.1,  # required free share at start; the next line sets the size
        "kv_cache_memory_bytes": 1 << 30,
        "attention_backend": "TRITON_ATTN",  # replaced by ours
    }
    started = {"plain": Engine(plain, tmp_path_factory.mktemp("plain"))}
    watch = WATCH if mode == "eager" else {}
    for name, trees in TREES.items():
        medusa = {"method": "medusa", "model": str(ROOT / "tests/assets/heads"), **trees}
        options = plain | {"speculative_config": medusa}
        started[name] = Engine(options, tmp_path_factory.mktemp(name), **watch)
    yield mode, started
    for engine in started.values():
        engine.process.kill()
        engine.process.wait()


def compiled_late(output: str) -> set[str]:
    """Kernels that vLLM's monitor reported as compiled after warm-up."""
    return set(re.findall(r"compilation during inference: (?:\w+\.)*(\w+)", output))


def waited(output: str) -> set[str]:
    """Lines of our code (file and line) where vLLM reported a sync."""
    return set(re.findall(r"(\S*vllm_medusa\S*\.py:\d+): UserWarning: .*synchron", output))


def own_kernels() -> set[str]:
    """The names of this package's kernels, from its sources."""
    files = (ROOT / "vllm_medusa").rglob("*.py")
    found = (re.findall(r"@triton\.jit.*?\ndef (\w+)", f.read_text(), re.DOTALL) for f in files)
    return {name for names in found for name in names}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("trees", TREES)
def test_trees_give_plain_tokens(engines: tuple[str, dict[str, Engine]], trees: str):
    mode, started = engines
    plain, _ = started["plain"].wait()
    got, output = started[trees].wait()
    assert got == plain
    assert not compiled_late(output) & own_kernels()
    assert mode != "eager" or "tree" not in TREES[trees] or not waited(output)


@pytest.mark.parametrize(
    ("said", "compiled", "lines"),
    [
        ("", 0, 0),
        ("Triton kernel JIT compilation during inference: attend. This causes", 1, 0),
        ("Triton kernel JIT compilation during inference: _of_vllm. This causes", 0, 0),
        ("/x/vllm_medusa/integration/a.py:7: UserWarning: called a synchronizing CUDA", 0, 1),
        ("/x/vllm_medusa/a.py:7: UserWarning: Tensor.to: that may be silently synchronous", 0, 1),
        ("/x/vllm/worker/a.py:7: UserWarning: called a synchronizing CUDA operation", 0, 0),
    ],
)
def test_messages_of_vllm_are_recognized(said: str, compiled: int, lines: int):
    """Negative controls of both checks."""
    assert len(compiled_late(said) & own_kernels()) == compiled
    assert len(waited(said)) == lines
