"""What our workers add to vLLM's, whatever the platform."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.worker_base import WorkerBase

from vllm_medusa.worker import compat
from vllm_medusa.worker.weights import heads_left_out


class WithTrees(WorkerBase):
    """Mixed into a worker of vLLM: its V2 runner gets our speculator and tree attention."""

    def init_device(self) -> None:
        """Register tree attention and the speculator, then build the runner."""
        from vllm_medusa.worker.v2.platform import tree_backend
        from vllm_medusa.worker.v2.speculator import install

        backend = tree_backend()
        register_backend(AttentionBackendEnum[backend.name], backend.path)
        compat.forget_attention_backends()
        install()
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Compile our kernels too, before vLLM's warm-up ends and graphs are captured."""
        from vllm_medusa.worker.v2.warmup import warm_up

        if self.vllm_config.kernel_config.enable_jit_warmup:
            warm_up(self.model_runner)
        return super().compile_or_warm_up_model()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target and the heads; heads in the target's checkpoint are no part of it."""
        with heads_left_out():
            super().load_model(*args, **kwargs)
