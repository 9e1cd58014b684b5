"""Medusa-1: heads on a frozen target (https://arxiv.org/abs/2401.10774, section 2.2.1).

    loss = sum over k = 1 ... K of decay^k * mean cross-entropy of head k at t + k + 1

The target doesn't change, so its hidden states are computed once (`hidden_cache`), and a step costs
the heads alone. Positions don't see each other, so a step takes short pieces of many texts. All
means are over the labels of a whole step, however it is split over micro-batches and processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import Measurement, label_ranks
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import draft_lm_head, whole_lm_head
from vllm_medusa.training.losses import IGNORED, head_losses, head_weights
from vllm_medusa.training.optimisation import (
    Optimisation,
    clip_gradients,
    make_optimizer,
    set_rate,
)
from vllm_medusa.training.order import Order, split
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Piece
from vllm_medusa.training.workers import Workers

LABELS = ("tokens", "soft")
PIECE_ROWS = 128
_MEASURED_ROWS = 4096  # a batch of measuring


class NotFiniteError(RuntimeError):
    """Training met a loss or gradient that is NaN or infinite, and stopped before using it."""


@dataclass(frozen=True)
class Recipe:
    """How heads are trained, their shape aside.

    Attributes:
        labels: "tokens" of the text (paper), or "soft": the target's distribution over each.
        decay: lambda_k = decay^k.
        epochs: passes over the text.
        batch_rows: positions a step, of all processes and micro-batches together.
        accumulate: micro-batches a step and process; more take less memory.
        bf16: compute in bfloat16 where autocast allows; weights and sums stay fp32.
        optimisation: learning rate and so on.
        seed: of the order of the text.
        measure_every: steps between two measurements on held-out text.
        measured_rows: at most so many held-out positions are measured.

    """

    labels: str = "soft"
    decay: float = 0.8
    epochs: int = 3
    batch_rows: int = 1024
    accumulate: int = 1
    bf16: bool = False
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: int = 0
    measure_every: int = 500
    measured_rows: int = 16384

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def usual_rate(hidden_size: int) -> float:
    """Peak learning rate where none is given: 1e-3, and more for narrow targets, up to 5e-3.

    AdamW moves each weight by about the rate, so a layer's output by about rate times width. 1e-3
    is the reference recipe's, for a width of 4096; at the demo target's 256, 5e-3 learns far more
    in the same steps.
    """
    return min(5e-3, max(1e-3, 1.28 / hidden_size))


def usual_batch(rows: int) -> int:
    """Positions a step where none is given, of ``rows`` in all epochs: about 1500 steps.

    At least 256, at most 4096, in steps of 128.
    """
    return min(4096, max(256, rows // 1500 // 128 * 128))


Report = Callable[[int, int, dict[str, Any]], None]  # step, of how many, a line of the log


class Medusa1:
    """Trains heads; only they, and nothing of the target, are given to the optimiser."""

    def __init__(
        self,
        target: Target,
        heads: MedusaHeads,
        train: HiddenStates,
        heldout: HiddenStates | None,
        recipe: Recipe,
        run: TrainingRun,
        workers: Workers,
        *,
        save_seconds: float = 60.0,
    ) -> None:
        """Prepare training; the states have to be built.

        Args:
            target: the frozen target.
            heads: heads to train, fp32, changed in place.
            train: states of the text to train on.
            heldout: states of the text to measure on.
            recipe: how.
            run: where the state and the log are kept.
            workers: the processes.
            save_seconds: time between two states written; the result doesn't depend on it.

        """
        self.target, self.recipe, self.run, self.workers = target, recipe, run, workers
        self.heads = heads.to(workers.device)
        self.train_states, self.heldout = train, heldout
        self.save_seconds = save_seconds
        self.soft = recipe.labels == "soft"
        own_dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self.lm_head = self.teacher = draft_lm_head(target, heads, own_dtype)
        if self.soft and heads.token_map is not None:
            self.teacher = whole_lm_head(target, own_dtype)
        self.optimizer = make_optimizer([(heads.parameters(), 1.0)], recipe.optimisation)
        self.decay = head_weights(heads.num_heads, recipe.decay).to(workers.device)
        size = min(PIECE_ROWS, recipe.batch_rows)
        self.pieces = train.texts.pieces(size)
        self.order = Order(
            [len(piece) for piece in self.pieces],
            train.groups(self.pieces),
            batch_rows=recipe.batch_rows,
            epochs=recipe.epochs,
            seed=recipe.seed,
        )
        self.step = 0

    @property
    def steps(self) -> int:
        """How many steps the whole run has."""
        return self.order.steps

    def train(self, report: Report | None = None) -> MedusaHeads:
        """Train from the run's last state to the end; returns the heads.

        Raises:
            NotFiniteError: see `_stop`; the last good state is kept.

        """
        self._resume()
        last_save = time.monotonic()
        while self.step < self.steps:
            entry = self._one_step()
            self.step += 1
            self._log(entry, report)
            measured = self.step % self.recipe.measure_every == 0 and self.step < self.steps
            if measured and self.heldout is not None:
                self._log({"step": self.step, "heldout": self.measure()}, report)
            if measured or self.step == self.steps or self._due(last_save):
                self.run.save(self._state())
                last_save = time.monotonic()
        return self.heads.eval().requires_grad_(False)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Loss and top-1 ... top-10 accuracy of every head on held-out text, plain JSON."""
        assert self.heldout is not None
        total = Measurement.empty(self.heads.num_heads)
        pieces = self.heldout.texts.pieces(PIECE_ROWS)
        limit = max(1, self.recipe.measured_rows // PIECE_ROWS)
        chosen = pieces[:: -(-len(pieces) // limit)]
        mine = split([len(piece) for piece in chosen], self.workers.world)[self.workers.rank]
        while mine:
            batch: list[Piece] = []
            while mine and sum(map(len, batch)) < _MEASURED_ROWS:
                batch.append(chosen[mine.pop()])
            states, labels, _ = self._rows(self.heldout, batch, soft=False)
            with self._autocast():
                found = head_losses(self.heads, states, labels, self.decay, self.lm_head)
                ranks = label_ranks(self.heads, states, labels, self.lm_head)
            total.add(found, ranks, labels)
        packed = self.workers.add_up(total.packed())
        return Measurement.unpacked(packed.cpu(), self.heads.num_heads).summary()

    def _one_step(self) -> dict[str, Any]:
        """Gradients of all micro-batches and processes, then one step of the optimiser."""
        recipe, workers = self.recipe, self.workers
        pieces = [self.pieces[i] for i in self.order.pieces(self.step)]
        counts = self._label_counts(pieces).to(workers.device)
        weights = self.decay / counts.clamp(min=1)
        parts = split([len(piece) for piece in pieces], recipe.accumulate * workers.world)
        sums = torch.zeros(self.heads.num_heads, device=workers.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts[workers.rank :: workers.world]:
            if part:
                chosen = [pieces[i] for i in part]
                sums += self._backward(chosen, weights)
        workers.share_gradients(self.heads.parameters())
        sums = workers.add_up(sums)
        norm = clip_gradients(self.optimizer, recipe.optimisation.clip)
        if not bool(torch.isfinite(torch.cat([sums, norm.view(1)])).all()):
            self._stop(pieces, sums, norm)
        rate = set_rate(self.optimizer, self.step, self.steps, recipe.optimisation)
        self.optimizer.step()
        losses = sums / counts.clamp(min=1)
        return {
            "step": self.step + 1,
            "loss": float((losses * self.decay).sum()),
            "losses": [round(value, 5) for value in losses.tolist()],
            "norm": float(norm),
            "rate": rate,
            "rows": sum(map(len, pieces)),
        }

    def _backward(self, pieces: Sequence[Piece], weights: Tensor) -> Tensor:
        """Add a micro-batch's gradients; returns its loss sums [K]."""
        states, labels, temperatures = self._rows(self.train_states, pieces, soft=self.soft)
        with self._autocast():
            found = head_losses(
                self.heads,
                states,
                labels,
                weights,
                self.lm_head,
                temperatures=temperatures,
                teacher_lm_head=self.teacher,
            )
        found.loss.backward()
        return found.sums

    def _rows(
        self, source: HiddenStates, pieces: Sequence[Piece], *, soft: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """States fp32 [N, H], labels int64 [N, K] and, for soft labels, temperatures [N]."""
        texts, count = source.texts, self.heads.num_heads
        wanted = [(p.span, *texts.needed(p, count, soft=soft)) for p in pieces]
        labels = [torch.from_numpy(texts.labels(p, count, soft=soft)) for p in pieces]
        device = self.workers.device
        temperatures = None
        if soft:
            of_piece = torch.from_numpy(texts.temperatures[[texts.record_of(p) for p in pieces]])
            sizes = torch.tensor([len(part) for part in labels])
            temperatures = of_piece.repeat_interleave(sizes).to(device)
        return source.read(wanted).to(device), torch.cat(labels).to(device), temperatures

    def _label_counts(self, pieces: Sequence[Piece]) -> Tensor:
        """Labels of each head in some pieces, as `head_losses` counts them: int64 [K]."""
        texts, heads = self.train_states.texts, self.heads
        labels = torch.cat(
            [torch.from_numpy(texts.labels(p, heads.num_heads, soft=False)) for p in pieces]
        )
        counted = labels != IGNORED
        if heads.token_map is not None and not self.soft:
            counted &= torch.isin(labels, heads.token_map.cpu())
        return counted.sum(0)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.workers.device.type, torch.bfloat16, enabled=self.recipe.bf16, cache_enabled=False
        )

    def _due(self, last: float) -> bool:
        return time.monotonic() - last > self.save_seconds

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def _resume(self) -> None:
        state = self.run.load(self.workers.device)
        if state is not None:
            self.heads.load_state_dict(state["heads"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def _log(self, entry: dict[str, Any], report: Report | None) -> None:
        self.run.log(entry)
        if report is not None:
            report(self.step, self.steps, entry)

    def _stop(self, pieces: Sequence[Piece], sums: Tensor, norm: Tensor) -> None:
        """Keep the heads as they were before this step, and name the batch.

        Raises:
            NotFiniteError: always, with the lines whose loss isn't finite by itself, else all lines
                of the batch.

        """
        texts = self.train_states.texts
        culprits = []
        with torch.no_grad():
            for piece in pieces:
                rows = self._rows(self.train_states, [piece], soft=self.soft)
                states, labels, temperatures = rows
                with self._autocast():
                    found = head_losses(
                        self.heads,
                        states,
                        labels,
                        self.decay,
                        self.lm_head,
                        temperatures=temperatures,
                        teacher_lm_head=self.teacher,
                    )
                if not bool(found.sums.isfinite().all()):
                    culprits.append(piece)
        lines = texts.lines_of(culprits or pieces)
        kept: Path | None = None
        if self.workers.main and all(bool(p.isfinite().all()) for p in self.heads.parameters()):
            self.run.save(self._state())
            kept = self.run.folder / "last_good"
            save_heads(kept, self.heads, {"training": {"steps": self.step}})
        what = "by themselves" if culprits else "(none of them by itself)"
        raise NotFiniteError(
            f"step {self.step + 1} of {self.steps}: the loss is {sums.tolist()} and the gradient's "
            f"norm {float(norm):.3g}. Lines of this batch {what}: {_shown(lines)}. "
            + (f"The heads of step {self.step} are in {kept}. " if kept else "")
            + "Try a lower --learning-rate, --precision float32, or drop the lines."
        )


def _shown(lines: Sequence[int], limit: int = 20) -> str:
    more = f" and {len(lines) - limit} more" if len(lines) > limit else ""
    return ", ".join(map(str, lines[:limit])) + more
