"""`support.ranks` on vLLM's V1 runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.ranks import Recording
from vllm_medusa.worker.v1.worker import MedusaCPUWorker


class RecordingWorker(Recording, MedusaCPUWorker):
    """Records every decision; drafts, samples or logits can be disturbed."""

    def init_device(self) -> None:
        """Hook this worker's only runner."""
        super().init_device()
        self._verifier = self.model_runner._verifier
        self._propose = self.model_runner.propose_draft_token_ids
        self.model_runner.propose_draft_token_ids = self._record

    @property
    def drafter(self) -> Any:
        """The `MedusaDrafter` of this rank."""
        return self.model_runner.drafter

    def disturb(self, kind: str) -> None:
        """Make this rank differ from rank 0, which is unchanged."""
        if kind == "shared_draws":
            torch.manual_seed(self.rank)
        else:
            change = {"draws": _other_draws, "logits": _other_logits}[kind]
            self.model_runner._verifier = change(self._verifier, self.rank)

    def restore(self) -> None:
        """Undo `disturb`."""
        self.model_runner._verifier = self._verifier
        torch.manual_seed(0)

    def _record(self, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.model_runner
        step, verdict = runner.trees.step, runner.trees.verdict
        drafts = self._propose(scheduler_output, sampled, *args, **kwargs)
        for index, req_id in enumerate(runner.input_batch.req_ids):
            if not sampled[index]:
                continue
            request = runner.requests[req_id]
            planted = self.planted(
                request.prompt_token_ids,
                request.sampling_params,
                len(request.output_token_ids),
                [
                    1 if step is None else int(step.num_nodes[index]),
                    [0] if step is None else _path(verdict, index),
                    list(sampled[index]),
                    list(drafts[index]),
                ],
            )
            if planted is not None:
                drafts[index] = planted[: len(drafts[index])]
        return drafts


def _path(verdict: Any, index: int) -> list[int]:
    path = verdict.path
    return path.nodes[index, : int(path.num_accepted[index]) + 1].tolist()


def _other_draws(verifier: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Every request's generator starts in a different state on every rank."""
    met: dict[int, torch.Generator] = {}  # by id; kept alive, so that ids stay unique

    def verify(logits: Any, step: Any, metadata: Any, *rest: Any) -> Any:
        for generator in metadata.generators.values():
            if id(generator) not in met:
                met[id(generator)] = generator
                generator.manual_seed(generator.initial_seed() + rank)
        return verifier(logits, step, metadata, *rest)

    return verify


def _other_logits(verifier: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Add noise to the logits of every rank except the first, a tenth of their spread."""

    def verify(logits: Any, *rest: Any) -> Any:
        noise = rank * 0.1 * logits.std() * torch.randn_like(logits)
        return verifier(logits + noise, *rest)

    return verify
