"""The training loop of every method: steps, log, measurements, checkpoints.

A step takes the items of `rows.plan_steps`, divides them among processes (``accelerate launch``),
splits each share into passes, and divides every loss by its labels in the whole step. It saves
checkpoints at every measurement, at the end, and at intervals; a killed run resumes from
the last one and ends with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.job import JobFailed
from vllm_medusa.training.method import Method
from vllm_medusa.training.rows import deal, plan_steps, split_passes
from vllm_medusa.training.run import Stage

Report = Callable[[int, int, dict[str, Any]], None]  # step, number of steps, a line of the log
_SHOWN_LINES = 20


class NotFiniteError(JobFailed):
    """A loss or gradient is NaN or infinite; training stopped before using it."""


class Loop:
    """Trains a method from a stage's last checkpoint to the end."""

    def __init__(
        self,
        method: Method,
        stage: Stage,
        *,
        save_seconds: float = 60.0,  # between checkpoints; does not affect the result
    ) -> None:
        self.method, self.stage, self.workers = method, stage, method.workers
        self.settings, self.save_seconds = method.settings, save_seconds
        settings = self.settings
        assert settings.batch_tokens and settings.learning_rate
        groups = [
            {"params": [p for p in parameters if p.requires_grad], "factor": factor}
            for parameters, factor in method.parameters()
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
        self.plan = plan_steps(
            method.lengths,
            method.groups,
            batch=settings.batch_tokens,
            epochs=settings.epochs,
            seed=settings.seed,
        )
        self.step, self.steps = 0, len(self.plan)

    def train(self, report: Report = lambda *_: None) -> None:
        """Train in place.

        Raises:
            NotFiniteError: the last good state is kept.

        """
        method, every = self.method, self.settings.measure_every
        if not self.resume() and method.measures_ends:
            self._measure(report)
            self._save()
        saved = time.monotonic()
        while self.step < self.steps:
            entry = self._one_step()
            self.step += 1
            self._log(entry, report)
            last, due = self.step == self.steps, self.step % every == 0
            if method.measures_ends if last else due:
                self._measure(report)
            if last or due or time.monotonic() - saved > self.save_seconds:
                self._save()
                saved = time.monotonic()
        method.heads.eval().requires_grad_(False)

    def resume(self) -> bool:
        """Continue from the stage's last checkpoint, if there is one."""
        state = self.stage.load(self.workers.device)
        if state is None:
            return False
        self.method.load(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return True

    def _save(self) -> None:
        state = {"step": self.step, "optimizer": self.optimizer.state_dict()}
        self.stage.save(state | self.method.state())

    def _one_step(self) -> dict[str, Any]:
        method, workers = self.method, self.workers
        items = self.plan[self.step]
        mine = deal(items, method.lengths, workers.world)[workers.rank]
        passes = split_passes(mine, method.lengths, method.pass_rows)
        batches = [method.collate(items) for items in passes]
        weights = method.weights(self.step, self.steps)
        counts = torch.zeros_like(weights)
        for batch in batches:
            counts += batch.counts.to(counts)
        counts = workers.add_up(counts).clamp(min=1)
        sums = torch.zeros_like(weights)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with method.autocast():
                loss, found = method.loss(batch, weights / counts)
            loss.backward()
            sums += found
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        workers.share_gradients(parameters)
        sums = workers.add_up(sums)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip)
        if not bool(torch.isfinite(torch.cat([sums, norm.view(1)])).all()):
            self._stop(items, sums, norm, parameters)
        rate = self._set_rate()
        self.optimizer.step()
        means = sums / counts
        return {
            "step": self.step + 1,
            "loss": float((means * weights).sum()),
            **method.entry(means, weights),
            "norm": float(norm),
            "rate": rate,
            "rows": sum(method.lengths[item] for item in items),
        }

    def _set_rate(self) -> float:
        assert self.settings.learning_rate is not None
        factor = rate_at(self.step, self.steps, self.settings.warmup_steps or 0)
        rate = self.settings.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        return rate

    def _measure(self, report: Report) -> None:
        if (found := self.method.measure()) is not None:
            self._log({"step": self.step, **found}, report)

    def _log(self, entry: dict[str, Any], report: Report) -> None:
        self.stage.log(entry)
        report(self.step, self.steps, entry)

    def _stop(
        self, items: Sequence[int], sums: Tensor, norm: Tensor, trained: Sequence[Tensor]
    ) -> None:
        """Keep the state before this step, and raise."""
        method = self.method
        ones = torch.ones_like(sums)
        with torch.no_grad(), method.autocast():
            losses = [method.loss(method.collate([item]), ones)[1] for item in items]
        culprits = [i for i, found in zip(items, losses, strict=True) if not found.isfinite().all()]
        lines = method.lines(culprits or items)
        shown = ", ".join(map(str, lines[:_SHOWN_LINES]))
        if len(lines) > _SHOWN_LINES:
            shown += f" and {len(lines) - _SHOWN_LINES} more"
        if all(bool(p.isfinite().all()) for p in trained):
            self._save()
        raise NotFiniteError(
            f"step {self.step + 1} of {self.steps}: the losses are {sums.tolist()}, the "
            f"gradient's norm {float(norm):.3g}. Lines of this batch "
            f"{'with this problem' if culprits else '(none has it alone)'}: {shown}. "
            "Try a lower --learning-rate, --precision float32, or remove the lines."
        )


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate at ``step`` (from 0): linear up to 1, then a cosine to 0.

    The warm-up takes at most a tenth of the steps.
    """
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
