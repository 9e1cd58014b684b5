"""The loop that Medusa-1 and Medusa-2 share: steps, log, measurements, states; what stops it.

A state is written at every measurement, at the end, and when some time has passed; a run that was
killed goes on from the last and ends with the same bits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.job import JobFailed
from vllm_medusa.training.losses import AnyHeads, head_weights
from vllm_medusa.training.optimisation import clip_gradients, set_rate
from vllm_medusa.training.recipe import JointRecipe, Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.workers import Workers

Report = Callable[[int, int, dict[str, Any]], None]  # step, of how many, a line of the log
_SHOWN_LINES = 20


class NotFiniteError(JobFailed):
    """Training met a loss or gradient that is NaN or infinite, and stopped before using it."""


class Trainer(ABC):
    """One stage of a training.

    Attributes:
        step: how many steps are done.
        steps: how many the whole stage has.
        optimizer: of everything that is trained; set by the method, as ``steps`` is.

    """

    heads: AnyHeads
    steps: int
    optimizer: torch.optim.AdamW
    measures_ends = False  # before the first step and after the last, too

    def __init__(
        self,
        heads: AnyHeads,
        recipe: Recipe | JointRecipe,
        run: TrainingRun,
        workers: Workers,
        save_seconds: float,
    ) -> None:
        self.heads = heads.to(workers.device).requires_grad_(True)
        if isinstance(heads, EagleDrafter) and heads.frozen_lm_head:
            heads.lm_head.requires_grad_(False)
        self.run, self.workers, self.save_seconds = run, workers, save_seconds
        self.decay = head_weights(heads.num_heads, recipe.decay).to(workers.device)
        self.step = 0
        self._recipe = recipe

    def train(self, report: Report = lambda *_: None) -> None:
        """Train from the run's last state to the end; what is trained is changed in place.

        Raises:
            NotFiniteError: see `update`; the last good state is kept.

        """
        every = self._recipe.measure_every
        if not self.resume() and self.measures_ends:
            self._measure(report)
            self.run.save(self.state())
        last_save = time.monotonic()
        while self.step < self.steps:
            entry = self._one_step()
            self.step += 1
            self._log(entry, report)
            last, due = self.step == self.steps, self.step % every == 0
            if self.measures_ends if last else due:
                self._measure(report)
            if last or due or time.monotonic() - last_save > self.save_seconds:
                self.run.save(self.state())
                last_save = time.monotonic()
        self.heads.eval().requires_grad_(False)

    def resume(self) -> bool:
        """Take up the run's last state, if there is one."""
        state = self.run.load(self.workers.device)
        if state is not None:
            self.take(state)
        return state is not None

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.step,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    @abstractmethod
    def measured(self) -> dict[str, Any] | None:
        """What the log says of held-out text; None: there is none."""

    @abstractmethod
    def _one_step(self) -> dict[str, Any]:
        """Gradients of all passes and processes, then `update`; returns the log's line."""

    @abstractmethod
    def _sums(self, part: Any) -> Tensor:
        """Loss sums of one part of a step by itself, without gradients."""

    @abstractmethod
    def _lines(self, parts: Sequence[Any]) -> list[int]:
        """Lines of the data that parts of a step are of, ascending."""

    @abstractmethod
    def _keep(self, folder: Path) -> str:
        """Write what was trained; returns it in words."""

    def update(self, sums: Tensor, parts: Sequence[Any]) -> tuple[Tensor, dict[str, Any]]:
        """Step the optimiser, once the gradients are there.

        ``sums`` are this process's, of every loss; ``parts`` what the step trains on, as `_sums`
        takes it. Returns the sums of all processes, and what the log says of the step itself.

        Raises:
            NotFiniteError: a sum or the gradient isn't finite, and nothing was stepped. It names
                the lines whose loss isn't finite by itself, else all lines of the step.

        """
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.workers.share_gradients(trained)
        sums = self.workers.add_up(sums)
        norm = clip_gradients(self.optimizer, self._recipe.optimisation.clip)
        if not bool(torch.isfinite(torch.cat([sums, norm.view(1)])).all()):
            self._stop(parts, sums, norm, trained)
        rate = set_rate(self.optimizer, self.step, self.steps, self._recipe.optimisation)
        self.optimizer.step()
        return sums, {"norm": float(norm), "rate": rate}

    def autocast(self) -> torch.autocast:
        """Compute in bfloat16 where the recipe says so."""
        kind, bf16 = self.workers.device.type, self._recipe.bf16
        return torch.autocast(kind, torch.bfloat16, enabled=bf16, cache_enabled=False)

    def _measure(self, report: Report) -> None:
        found = self.measured()
        if found is not None:
            self._log({"step": self.step, **found}, report)

    def _log(self, entry: dict[str, Any], report: Report) -> None:
        self.run.log(entry)
        report(self.step, self.steps, entry)

    def _stop(
        self, parts: Sequence[Any], sums: Tensor, norm: Tensor, trained: Sequence[Tensor]
    ) -> None:
        """Keep everything as it was before this step, and raise."""
        with torch.no_grad():
            culprits = [part for part in parts if not bool(self._sums(part).isfinite().all())]
        lines = self._lines(culprits or parts)
        shown = ", ".join(map(str, lines[:_SHOWN_LINES]))
        if len(lines) > _SHOWN_LINES:
            shown += f" and {len(lines) - _SHOWN_LINES} more"
        kept = ""
        if self.workers.main and all(bool(p.isfinite().all()) for p in trained):
            self.run.save(self.state())
            folder = self.run.folder / "last_good"
            kept = f"The {self._keep(folder)} of step {self.step} are in {folder}. "
        raise NotFiniteError(
            f"step {self.step + 1} of {self.steps}: the losses are {sums.tolist()} and the "
            f"gradient's norm {float(norm):.3g}. Lines of this batch "
            f"{'by themselves' if culprits else '(none of them by itself)'}: {shown}. {kept}"
            "Try a lower --learning-rate, --precision float32, or drop the lines."
        )
