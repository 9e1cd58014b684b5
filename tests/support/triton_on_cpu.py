"""Lets vLLM's V2 model runner run on a machine without a GPU: Triton through its interpreter.

A pytest plugin (``-p support.triton_on_cpu``), since all of it has to happen before vLLM or Triton
is imported: vLLM on CPU takes Triton for usable if a backend named "cpu" is installed, and
`TRITON_INTERPRET` makes every kernel Python. Processes started from here inherit both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BACKEND = str(Path(__file__).with_name("triton_backend"))

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines run here, where tests can look in
if BACKEND not in sys.path:
    sys.path.insert(0, BACKEND)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [BACKEND, os.environ.get("PYTHONPATH")])
    )


def pytest_sessionstart() -> None:
    """Have vLLM truncate to top-k and top-p in torch: the interpreter fails on its kernel for it.

    (A loop variable it expects to be a tensor is a Python int there.)
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
