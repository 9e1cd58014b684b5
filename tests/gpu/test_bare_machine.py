"""GPU tests need torch, Triton, pytest and pydantic; those that need vLLM are at least collected.

Here they run in a process that refuses all other packages. Without a GPU it interprets one test of
each file, so that late imports in the tests and the package are covered too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import NOT_INTERPRETING

ROOT = Path(__file__).parents[2]
KERNELS = sorted(path.parent.name for path in ROOT.glob("tests/unit/*/test_kernel.py"))
QUICK = (  # one test of each file that has interpreted ones
    "TestInterpreted and (empty_batch or wrong_slot or many_chunks"
    " or tree_decoding or attention_is_checked)"
)
BARE = """
import importlib.metadata as metadata, importlib.abc, re, sys

allowed, waiting = {"vllm-medusa"}, ["torch", "triton", "pytest", "numpy", "pydantic"]
while waiting:
    name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
    if name not in allowed:
        allowed.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another system
        waiting += [re.match(r"[\\w.-]+", line)[0] for line in needed if "extra ==" not in line]
modules = {
    module
    for module, packages in metadata.packages_distributions().items()
    if not {re.sub(r"[-_.]+", "-", package).lower() for package in packages} & allowed
}
assert {"vllm", "safetensors", "transformers", "hypothesis"} <= modules, sorted(modules)

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}: not on a bare machine", name=name)

sys.meta_path.insert(0, Refuse())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_bare(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BARE, "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


FILES = [f"tests/unit/{package}/test_kernel.py" for package in KERNELS]


@NOT_INTERPRETING
def test_all_are_collected():
    pytest.importorskip("vllm", reason="nothing to refuse")
    found = run_bare("--collect-only", "-m", "gpu", *FILES, "tests/gpu")
    for file in (*FILES, "tests/gpu/test_decode.py", "tests/gpu/test_engine.py"):
        assert f"{file}::" in found
    assert int(re.search(r"(\d+)(?:/\d+)? tests collected", found)[1]) > 200


@NOT_INTERPRETING
def test_one_of_each_runs():
    pytest.importorskip("vllm", reason="nothing to refuse")
    files = (*FILES, "tests/gpu/test_decode.py", "tests/gpu/test_timing.py")
    found = run_bare("-k", QUICK, *files, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert re.search(r"\b[1-9]\d* passed", found) and "skipped" not in found
