"""`support.ranks` on vLLM's V2 runner."""

from __future__ import annotations

from typing import Any

from support.ranks import Recording
from support.triton_on_cpu import prepare
from vllm_medusa.integration.v2.worker import MedusaWorker


class RecordingWorker(Recording, MedusaWorker):
    """Records every decision."""

    def init_device(self) -> None:
        prepare()
        super().init_device()

    @property
    def drafter(self) -> Any:
        return self.model_runner.speculator.drafter
