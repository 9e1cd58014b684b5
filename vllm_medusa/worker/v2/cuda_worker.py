"""The V2 worker on CUDA; separate because vLLM's CPU worker must not be imported there."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_medusa.worker.v2.with_trees import WithTrees


class MedusaCUDAWorker(WithTrees, Worker):
    """Builds vLLM's V2 runner with our speculator and tree attention."""
