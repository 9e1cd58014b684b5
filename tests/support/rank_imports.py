"""What every rank would import or find out for itself: a fork server of ranks imports this first.

Without it, each rank imports 500 more modules after the fork, and starts three processes to find
out which vector instructions the C++ compiler may use.
"""

from __future__ import annotations

import gc
from importlib import import_module

from support.ranks import WORKER
from support.runner import sized
from vllm_medusa.kernels import cpu_library

for _name in (
    WORKER.rpartition(".")[0],
    "vllm.compilation.backends",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm_medusa.integration.scheduling.scheduler",
    "vllm_medusa.integration.startup.startup_timing",
    f"vllm_medusa.integration.{sized('v1.eagle_proposer', 'v2.worker')}",
):
    import_module(_name)
cpu_library()
gc.collect()  # excludes all imports: see `startup/sitecustomize.py`
