"""Makes vLLM's V2 model runner run on a machine without a GPU: Triton with its interpreter.

A pytest plugin (``-p support.triton_on_cpu``), because it must run before vLLM or Triton
is imported: vLLM on CPU considers Triton usable if a backend named "cpu" is installed, and
`TRITON_INTERPRET` makes every kernel run as Python. Child processes inherit both.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.interpreter import speed_up, trust_integers

_kernels: dict[str, Any] = {}  # of the rules, which `prepare` replaces
BACKEND = str(Path(__file__).with_name("triton_backend"))

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run in this process, for inspection
if BACKEND not in sys.path:
    sys.path.insert(0, BACKEND)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [BACKEND, os.environ.get("PYTHONPATH")])
    )


def pytest_sessionstart() -> None:
    """Replace what the interpreter does not support, or is too slow for."""
    prepare()


@functools.cache
def prepare() -> None:
    """Must be called before an engine starts, in every process with an engine.

    vLLM truncates to top-k and top-p in torch, and applies grammar masks in torch: the interpreter
    fails on its kernels (a loop variable that it expects to be a tensor is a Python int there).
    The walk also uses torch, because our kernels would take much of a step here; that both give
    the same bits is tested in `tests/unit/sampler/test_kernel.py`, and `rules_in_triton` enables
    them for whole engines.
    """
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    speed_up()
    trust_integers()
    topk_topp_sampler.HAS_TRITON = False
    StructuredOutputsWorker.apply_grammar_bitmask = _apply_grammar_bitmask
    _kernels.update(_rules_in_torch())
    timing = importlib.import_module("vllm_medusa.integration.startup.startup_timing")
    timing.SECONDS = 1.0  # steps take a second


def _apply_grammar_bitmask(
    self: Any, logits: Any, batch: Any, req_ids: Sequence[str], bitmask: Any
) -> None:
    """Replaces vLLM's kernel, on which the interpreter fails: one mask row per logits row."""
    import numpy as np
    import torch

    masks = iter(bitmask)
    for req_id in req_ids:
        request = batch.req_ids.index(req_id)
        for row in range(*batch.cu_num_logits_np[request : request + 2]):
            bits = np.unpackbits(next(masks).view(np.uint8), bitorder="little")
            logits[row, torch.from_numpy(bits[: logits.shape[1]] == 0)] = -torch.inf


def _rules_in_torch() -> dict[str, Any]:
    """Replace the rules' kernels; returns them."""
    from support.in_torch import typical_path_torch
    from vllm_medusa.sampler import greedy_verdict, launch

    kernels = {name: getattr(launch, name) for name in ("target_verdict", "typical_path")}
    launch.target_verdict, launch.typical_path = greedy_verdict, typical_path_torch
    return kernels


@contextmanager
def rules_in_triton() -> Iterator[None]:
    """Engines started within the block verify with this package's kernels."""
    from vllm_medusa.sampler import launch

    for name, kernel in _kernels.items():
        setattr(launch, name, kernel)
    try:
        yield
    finally:
        _rules_in_torch()
