"""vLLM's CPU worker with our model runner."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.worker import cpu_worker

from vllm_medusa.integration.attention import install_attention
from vllm_medusa.integration.startup.options import is_eagle


class MedusaCPUWorker(cpu_worker.CPUWorker):
    """Runs `MedusaModelRunner` with tree attention in place of vLLM's CPU attention."""

    def init_device(self) -> None:
        """Build the runner; CPUWorker hardcodes its class, so the name is patched meanwhile."""
        from vllm_medusa.integration.v1.eagle_proposer import EagleModelRunner
        from vllm_medusa.integration.v1.history import install_moves
        from vllm_medusa.integration.v1.runner import MedusaModelRunner

        install_moves()
        install_attention()
        uses_eagle = is_eagle(self.vllm_config.speculative_config)
        runner = EagleModelRunner if uses_eagle else MedusaModelRunner
        with patch.object(cpu_worker, "CPUModelRunner", runner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Time steps first if the budget needs step times; vLLM then reseeds."""
        from vllm_medusa.integration.startup.startup_timing import measure_step_costs

        measure_step_costs(self)
        if (lookup := self.model_runner.trees.lookup) is not None:
            lookup.forget()  # dummy requests are not representative
        return super().compile_or_warm_up_model()
