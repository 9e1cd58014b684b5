"""`support.ranks` on vLLM's V2 runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.ranks import Recording
from support.triton_on_cpu import prepare
from vllm_medusa.worker.v2.worker import MedusaWorker


class RecordingWorker(Recording, MedusaWorker):
    """Records every decision; drafts, samples or logits can be disturbed."""

    def init_device(self) -> None:
        prepare()
        super().init_device()
        self._disturbance = ""
        runner = self.model_runner
        self._add_requests, runner.add_requests = runner.add_requests, self._note_requests

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._verify = self.model_runner.rejection_sampler
        self.model_runner.rejection_sampler = self._disturbed

    @property
    def drafter(self) -> Any:
        return self.model_runner.speculator.drafter

    def disturb(self, kind: str) -> None:
        """Make this rank differ from rank 0, which is unchanged."""
        self._disturbance = kind
        if kind == "shared_draws":
            np.random.seed(self.rank)  # vLLM derives the seeds of unseeded requests from it

    def restore(self) -> None:
        self._disturbance = ""
        np.random.seed(0)

    def _disturbed(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._disturbance == "logits":  # noise, a tenth of their spread
            logits = logits + self.rank * 0.1 * logits.std() * torch.randn_like(logits)
        return self._verify(logits, *args, **kwargs)

    def _note_requests(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        runner = self.model_runner
        if self._disturbance == "draws":
            for new in scheduler_output.scheduled_new_reqs:
                slot = runner.req_states.req_id_to_index[new.req_id]
                runner.sampler.sampling_states.seeds.np[slot] += self.rank
