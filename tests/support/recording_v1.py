"""`support.ranks` on vLLM's V1 runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.ranks import Recording
from vllm_medusa.integration.v1.worker import MedusaCPUWorker


class RecordingWorker(Recording, MedusaCPUWorker):
    """Records every decision; drafts, samples or logits can be disturbed."""

    def init_device(self) -> None:
        super().init_device()
        self._verifier = self.model_runner._verifier

    @property
    def drafter(self) -> Any:
        return self.model_runner.drafter

    def disturb(self, kind: str) -> None:
        """Make this rank differ from rank 0, which is unchanged."""
        if kind == "shared_draws":
            torch.manual_seed(self.rank)
        else:
            change = {"draws": _other_draws, "logits": _other_logits}[kind]
            self.model_runner._verifier = change(self._verifier, self.rank)

    def restore(self) -> None:
        self.model_runner._verifier = self._verifier
        torch.manual_seed(0)


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
