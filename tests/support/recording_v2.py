"""`support.ranks` on vLLM's V2 runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.ranks import Recording
from support.triton_on_cpu import prepare
from vllm_medusa.worker.v2.worker import MedusaCPUWorker


class RecordingWorker(Recording, MedusaCPUWorker):
    """Records every decision; drafts, samples or logits can be disturbed."""

    def init_device(self) -> None:
        """Hook this worker's only runner."""
        prepare()
        super().init_device()
        self._requests: dict[int, Any] = {}  # by slot in vLLM's state
        self._disturbance = ""
        runner = self.model_runner
        self._add_requests, runner.add_requests = runner.add_requests, self._note_requests
        self._propose, runner.speculator.propose = runner.speculator.propose, self._record

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Hook the model's draft verification."""
        super().load_model(*args, **kwargs)
        self._verify = self.model_runner.rejection_sampler
        self.model_runner.rejection_sampler = self._disturbed

    @property
    def drafter(self) -> Any:
        """The `MedusaDrafter` of this rank."""
        return self.model_runner.speculator.drafter

    def disturb(self, kind: str) -> None:
        """Make this rank differ from rank 0, which is unchanged."""
        self._disturbance = kind
        if kind == "shared_draws":
            np.random.seed(self.rank)  # vLLM derives the seeds of unseeded requests from it

    def restore(self) -> None:
        """Undo `disturb`."""
        self._disturbance = ""
        np.random.seed(0)

    def _disturbed(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._disturbance == "logits":  # noise, a tenth of their spread
            logits = logits + self.rank * 0.1 * logits.std() * torch.randn_like(logits)
        return self._verify(logits, *args, **kwargs)

    def _note_requests(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        runner = self.model_runner
        for new in scheduler_output.scheduled_new_reqs:
            slot = runner.req_states.req_id_to_index[new.req_id]
            self._requests[slot] = new
            if self._disturbance == "draws":
                runner.sampler.sampling_states.seeds.np[slot] += self.rank

    def _record(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        step, verdict = runner.speculator.trees.step, runner.speculator.trees.verdict
        drafts = self._propose(batch, *args, **kwargs)
        num_sampled, states = args[4].tolist(), runner.req_states
        for index, slot in enumerate(batch.idx_mapping_np):
            request, count = self._requests.get(int(slot)), num_sampled[index]
            if request is None or not count:
                continue
            end = int(states.total_len.gpu[slot])
            nodes = [0] if verdict is None else verdict.path.nodes[index, :count].tolist()
            planted = self.planted(
                request.prompt_token_ids,
                request.sampling_params,
                end - len(request.prompt_token_ids),
                [
                    1 if step is None else int(step.num_nodes[index]),
                    nodes,
                    states.all_token_ids.gpu[slot, end - count : end].tolist(),
                    drafts[index].tolist(),
                ],
            )
            if planted is not None:
                drafts[index] = torch.tensor(planted)
        return drafts
