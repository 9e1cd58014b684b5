"""The worker for V2 on CPU: vLLM's own, with trees added to the runner."""

from __future__ import annotations

from vllm.v1.worker import cpu_worker  # before any V2 module: it adapts them to the CPU

from vllm_medusa.worker.v2.with_trees import WithTrees


class MedusaCPUWorker(WithTrees, cpu_worker.CPUWorker):
    """Builds vLLM's V2 runner with our speculator and tree attention."""
