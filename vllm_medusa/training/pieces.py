"""Steps over pieces of text whose hidden states are cached: what Medusa-1 and EAGLE-3 share.

All means are over the labels of a whole step, however it is split over micro-batches and processes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.losses import IGNORED, AnyHeads
from vllm_medusa.training.optimisation import make_optimizer
from vllm_medusa.training.order import Order, split
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.texts import Piece
from vllm_medusa.training.trainer import Trainer
from vllm_medusa.training.workers import Workers


class PieceTrainer(Trainer):
    """Trains heads; only they are given to the optimiser."""

    def __init__(
        self,
        heads: AnyHeads,  # fp32, changed in place
        train: HiddenStates,  # of the text to train on, built
        heldout: HiddenStates | None,  # of the text to measure on, built
        recipe: Recipe,
        run: TrainingRun,
        workers: Workers,
        *,
        piece_rows: int,  # of a piece at most
        save_seconds: float = 60.0,  # between two states; the result doesn't depend on it
    ) -> None:
        """Prepare training."""
        super().__init__(heads, recipe, run, workers, save_seconds)
        self.recipe = recipe
        self.train_states, self.heldout = train, heldout
        self.soft = recipe.labels == "soft"
        self.piece_rows = piece_rows
        self.optimizer = make_optimizer(
            [([p for p in heads.parameters() if p.requires_grad], 1.0)], recipe.optimisation
        )
        self.pieces = train.texts.pieces(min(piece_rows, recipe.batch_rows))
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
        pieces = self.heldout.texts.pieces(self.piece_rows)
        limit = max(1, self.recipe.measured_rows // self._usual_rows(pieces))
        chosen = pieces[:: -(-len(pieces) // limit)]
        mine = split([len(piece) for piece in chosen], self.workers.world)[self.workers.rank]
        self._measure_pieces([chosen[i] for i in mine], total)
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

    def _usual_rows(self, pieces: Sequence[Piece]) -> int:
        """How many rows a piece is taken to have where some are chosen to measure on."""
        return self.piece_rows

    def _label_counts(self, pieces: Sequence[Piece]) -> Tensor:
        """Labels of each head in some pieces, as `head_losses` counts them: int64 [K]."""
        labels, heads = torch.cat([self._labels(piece) for piece in pieces]), self.heads
        counted = labels != IGNORED
        if heads.token_map is not None and not self.soft:
            counted &= torch.isin(labels, heads.token_map.cpu())
        return counted.sum(0)

    def _lines(self, parts: Sequence[Piece]) -> list[int]:
        return self.train_states.texts.lines_of(parts)

    @abstractmethod
    def _backward(self, pieces: Sequence[Piece], weights: Tensor) -> Tensor:
        """Add a micro-batch's gradients; returns its loss sums [K]."""

    @abstractmethod
    def _labels(self, piece: Piece) -> Tensor:
        """A piece's labels, int64 [n, K], `IGNORED` where there is none."""

    @abstractmethod
    def _measure_pieces(self, pieces: Sequence[Piece], total: Measurement) -> None:
        """Take held-out pieces in."""
