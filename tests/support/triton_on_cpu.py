"""Lets vLLM's V2 model runner run on a machine without a GPU: Triton through its interpreter.

A pytest plugin (``-p support.triton_on_cpu``), since all of it has to happen before vLLM or Triton
is imported: vLLM on CPU takes Triton for usable if a backend named "cpu" is registered, and
`TRITON_INTERPRET` makes every kernel Python.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the backend is registered in this process

import triton.backends


class _Driver:
    """All that vLLM asks of it; the interpreter needs no driver."""

    @classmethod
    def is_active(cls) -> bool:
        return True


def pytest_sessionstart() -> None:
    """Have vLLM truncate to top-k and top-p in torch: the interpreter fails on its kernel for it.

    (A loop variable it expects to be a tensor is a Python int there.)
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)
