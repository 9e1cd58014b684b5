"""Medusa-1: heads on a frozen target (https://arxiv.org/abs/2401.10774, section 2.2.1).

    loss = sum over k = 1 ... K of decay^k * mean cross-entropy of head k at t + k + 1

The target doesn't change, so its hidden states are computed once (`hidden_cache`), and a step costs
the heads alone. Positions don't see each other, so a step takes short pieces of many texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_medusa.heads.checkpoint import save_heads
from vllm_medusa.heads.hydra import HydraHeads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import target_lm_head
from vllm_medusa.training.losses import HeadLosses, head_losses
from vllm_medusa.training.pieces import PieceTrainer
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Piece
from vllm_medusa.training.workers import Workers

PIECE_ROWS = 32  # a step of 256 positions has parts of eight texts
_MEASURED_ROWS = 4096  # a batch of measuring


class _Rows(NamedTuple):
    """Rows of some pieces, one behind the other."""

    states: Tensor  # fp32 [N, H]
    labels: Tensor  # int64 [N, K]
    temperatures: Tensor | None  # fp32 [N], of soft labels
    path: Tensor | None  # int64 [N, K], the tokens after each row, for Hydra heads


class Medusa1(PieceTrainer):
    """Trains heads; only they, and nothing of the target, are given to the optimiser."""

    heads: MedusaHeads

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
        super().__init__(
            heads,
            train,
            heldout,
            recipe,
            run,
            workers,
            piece_rows=PIECE_ROWS,
            save_seconds=save_seconds,
        )
        self.target = target
        own_dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self.lm_head = self.teacher = target_lm_head(target, heads.token_map, own_dtype)
        if self.soft and heads.token_map is not None:
            self.teacher = target_lm_head(target, dtype=own_dtype)

    def _measure_pieces(self, pieces: Sequence[Piece], total: Measurement) -> None:
        assert self.heldout is not None
        mine = list(pieces)
        while mine:
            batch: list[Piece] = []
            while mine and sum(map(len, batch)) < _MEASURED_ROWS:
                batch.append(mine.pop())
            rows = self._rows(self.heldout, batch, soft=False)
            with self.autocast():
                total.measure(self.heads, rows.states, rows.labels, self.lm_head, rows.path)

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

    def _labels(self, piece: Piece) -> Tensor:
        found = self.train_states.texts.labels(piece, self.heads.num_heads, soft=False)
        return torch.from_numpy(found)

    def _sums(self, part: Piece) -> Tensor:
        return self._losses([part], self.decay).sums

    def _keep(self, folder: Path) -> str:
        save_heads(folder, self.heads, {"training": {"steps": self.step}})
        return "heads"
