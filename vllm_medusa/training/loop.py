"""The training loop of every method: steps, log, measurements, checkpoints.

A step takes the pieces of `rows.plan_steps`, divides them among processes (``accelerate launch``),
splits each share into passes, and divides every loss by its number of labels in the whole step. The
loop saves checkpoints at every measurement, at the end, and at intervals; a killed run resumes from
the last one and ends with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.job import JobFailed
from vllm_medusa.training.method import Method
from vllm_medusa.training.rows import deal, plan_steps
from vllm_medusa.training.run import Stage

Report = Callable[[int, int, dict[str, Any]], None]  # step, number of steps, a line of the log
_SHOWN_LINES = 20
_SAVE_SECONDS = 60.0  # between checkpoints; does not affect the result


class NotFiniteError(JobFailed):
    """A loss or gradient is NaN or infinite; training stopped before using it."""


class Loop:
    """Trains a method from a stage's last checkpoint to the end."""

    def __init__(self, method: Method, stage: Stage) -> None:
        from transformers import get_cosine_schedule_with_warmup

        self.method, self.stage, self.workers = method, stage, method.workers
        self.options = options = method.step_options
        data = method.data
        assert options.batch_tokens and options.learning_rate
        self.lengths = data.lengths
        self.plan = plan_steps(
            self.lengths,
            None if data.states is None else data.states.groups(data.pieces),
            batch=options.batch_tokens,
            epochs=options.epochs,
            seed=options.seed,
        )
        self.step, self.steps = 0, len(self.plan)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in own if p.requires_grad], "lr": options.learning_rate * factor}
            for own, factor in method.parameters()
        ]
        self.parameters = [p for group in groups for p in group["params"]]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay)
        warmup = min(options.warmup_steps or 0, self.steps // 10)
        self.schedule = get_cosine_schedule_with_warmup(self.optimizer, warmup, self.steps)

    def train(self, report: Report = lambda *_: None) -> None:
        """Train in place.

        Raises NotFiniteError: the last good state is kept.
        """
        method, every = self.method, self.options.measure_every
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
            if last or due or time.monotonic() - saved > _SAVE_SECONDS:
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
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        return True

    def _save(self) -> None:
        parts = {"optimizer": self.optimizer, "schedule": self.schedule}
        states = {name: part.state_dict() for name, part in parts.items()}
        self.stage.save({"step": self.step} | states | self.method.state())

    def _one_step(self) -> dict[str, Any]:
        method, workers = self.method, self.workers
        items = self.plan[self.step]
        mine = deal(items, self.lengths, workers.world)[workers.rank]
        batches = [method.collate(part) for part in method.data.passes(method.pass_rows, mine)]
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
        workers.share_gradients(self.parameters)
        sums = workers.add_up(sums)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        if not bool(torch.isfinite(torch.cat([sums, norm.view(1)])).all()):
            self._stop(items, sums, norm)
        (rate, *_) = self.schedule.get_last_lr()
        self.optimizer.step()
        self.schedule.step()
        means = sums / counts
        return {
            "step": self.step + 1,
            "loss": float((means * weights).sum()),
            **method.entry(means, weights),
            "norm": float(norm),
            "rate": rate,
            "rows": sum(self.lengths[item] for item in items),
        }

    def _measure(self, report: Report) -> None:
        if (found := self.method.measure()) is not None:
            self._log({"step": self.step, **found}, report)

    def _log(self, entry: dict[str, Any], report: Report) -> None:
        self.stage.log(entry)
        report(self.step, self.steps, entry)

    def _stop(self, items: Sequence[int], sums: Tensor, norm: Tensor) -> None:
        """Save the state before this step, and raise an error that names the lines of its data."""
        method, texts = self.method, self.method.data.texts
        pieces = [method.data.pieces[item] for item in items]
        ones = torch.ones_like(sums)
        with torch.no_grad(), method.autocast():
            bad = [
                piece
                for piece in pieces
                if not method.loss(method.collate([piece]), ones)[1].isfinite().all()
            ]
        lines = sorted(
            {texts.records[texts.record_of(piece.start)].line for piece in bad or pieces}
        )
        shown = ", ".join(map(str, lines[:_SHOWN_LINES]))
        if len(lines) > _SHOWN_LINES:
            shown += f" and {len(lines) - _SHOWN_LINES} more"
        if all(bool(p.isfinite().all()) for p in self.parameters):
            self._save()
        found = f"The loss of these lines is not finite: {shown}."
        if not bad:
            found = f"The batch has lines {shown}; each has a finite loss by itself."
        raise NotFiniteError(
            f"step {self.step + 1} of {self.steps}: the losses are {sums.tolist()}, the "
            f"gradient's norm {float(norm):.3g}. {found} "
            "Try a lower --learning-rate, --precision float32, or remove the lines."
        )
