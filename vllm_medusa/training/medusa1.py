"""Medusa-1: heads on a frozen target (https://arxiv.org/abs/2401.10774, section 2.2.1).

    loss = sum over k = 1 ... K of decay^k * mean cross-entropy of head k at t + k + 1

The target doesn't change, so its hidden states are computed once (`hidden_cache`), and a step costs
the heads alone. Positions don't see each other, so a step takes short pieces of many texts. All
means are over the labels of a whole step, however it is split over micro-batches and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import target_lm_head
from vllm_medusa.training.losses import IGNORED, HeadLosses, head_losses
from vllm_medusa.training.optimisation import make_optimizer
from vllm_medusa.training.order import Order, split
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Piece
from vllm_medusa.training.trainer import Trainer
from vllm_medusa.training.workers import Workers

PIECE_ROWS = 128
_MEASURED_ROWS = 4096  # a batch of measuring


class _Rows(NamedTuple):
    """Rows of some pieces, one behind the other."""

    states: Tensor  # fp32 [N, H]
    labels: Tensor  # int64 [N, K]
    temperatures: Tensor | None  # fp32 [N], of soft labels
    path: Tensor | None  # int64 [N, K], the tokens after each row, for Hydra heads


class Medusa1(Trainer):
    """Trains heads; only they, and nothing of the target, are given to the optimiser."""

    def __init__(
        self,
        target: Target,
        heads: MedusaHeads,  # fp32, changed in place
        train: HiddenStates,  # of the text to train on, built
        heldout: HiddenStates | None,  # of the text to measure on, built
        recipe: Recipe,
        run: TrainingRun,
        workers: Workers,
        *,
        save_seconds: float = 60.0,  # between two states; the result doesn't depend on it
    ) -> None:
        """Prepare training."""
        super().__init__(heads, recipe, run, workers, save_seconds)
        self.target, self.recipe = target, recipe
        self.train_states, self.heldout = train, heldout
        self.soft = recipe.labels == "soft"
        own_dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self.lm_head = self.teacher = target_lm_head(target, heads.token_map, own_dtype)
        if self.soft and heads.token_map is not None:
            self.teacher = target_lm_head(target, dtype=own_dtype)
        self.optimizer = make_optimizer([(heads.parameters(), 1.0)], recipe.optimisation)
        size = min(PIECE_ROWS, recipe.batch_rows)
        self.pieces = train.texts.pieces(size)
        self.order = Order(
            [len(piece) for piece in self.pieces],
            train.groups(self.pieces),
            batch_rows=recipe.batch_rows,
            epochs=recipe.epochs,
            seed=recipe.seed,
        )
        self.steps = self.order.steps

    def measured(self) -> dict[str, Any] | None:
        """See `Trainer`."""
        return None if self.heldout is None else {"heldout": self.measure()}

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
            rows = self._rows(self.heldout, batch, soft=False)
            with self.autocast():
                total.measure(self.heads, rows.states, rows.labels, self.lm_head, rows.path)
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
        sums, stepped = self.update(sums, pieces)
        losses = sums / counts.clamp(min=1)
        return {
            "step": self.step + 1,
            "loss": float((losses * self.decay).sum()),
            "losses": [round(value, 5) for value in losses.tolist()],
            **stepped,
            "rows": sum(map(len, pieces)),
        }

    def _backward(self, pieces: Sequence[Piece], weights: Tensor) -> Tensor:
        """Add a micro-batch's gradients; returns its loss sums [K]."""
        found = self._losses(pieces, weights)
        found.loss.backward()
        return found.sums

    def _losses(self, pieces: Sequence[Piece], weights: Tensor) -> HeadLosses:
        rows = self._rows(self.train_states, pieces, soft=self.soft)
        with self.autocast():
            return head_losses(
                self.heads,
                rows.states,
                rows.labels,
                weights,
                self.lm_head,
                temperatures=rows.temperatures,
                teacher_lm_head=self.teacher,
                path=rows.path,
            )

    def _rows(self, source: HiddenStates, pieces: Sequence[Piece], *, soft: bool) -> _Rows:
        texts, count, device = source.texts, self.heads.num_heads, self.workers.device
        wanted = [(p.span, *texts.needed(p, count, soft=soft)) for p in pieces]
        labels = [torch.from_numpy(texts.labels(p, count, soft=soft)) for p in pieces]
        temperatures = path = None
        if soft:
            of_piece = torch.from_numpy(texts.temperatures[[texts.record_of(p) for p in pieces]])
            sizes = torch.tensor([len(part) for part in labels])
            temperatures = of_piece.repeat_interleave(sizes).to(device)
        if isinstance(self.heads, HydraHeads):
            after = [torch.from_numpy(texts.following(p, count, soft=soft)) for p in pieces]
            path = torch.cat(after).to(device)
        states = source.read(wanted).to(device)
        return _Rows(states, torch.cat(labels).to(device), temperatures, path)

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

    def _sums(self, part: Piece) -> Tensor:
        return self._losses([part], self.decay).sums

    def _lines(self, parts: Sequence[Piece]) -> list[int]:
        return self.train_states.texts.lines_of(parts)

    def _keep(self, folder: Path) -> str:
        save_heads(folder, self.heads, {"training": {"steps": self.step}})
        return "heads"
