"""EAGLE-3's drafter on a frozen target, by training-time test (https://arxiv.org/abs/2503.01840).

    loss = sum over s = 1 ... K of decay^s * mean cross-entropy of step s at t + s + 1

The steps of the chain below a row are as heads at that row (see `EagleDrafter`), with the same
labels and weights; but entries attend to those before them, prompts' too, so a step takes whole
texts. They are cut at `PIECE_ROWS`; what follows a cut sees nothing before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_medusa.heads.checkpoint import save_drafter
from vllm_medusa.heads.eagle_model import EagleDrafter
from vllm_medusa.offline.records import Record
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.batches import split_passes
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.initial_heads import target_lm_head
from vllm_medusa.training.losses import (
    IGNORED,
    HeadLosses,
    head_labels,
    head_losses,
    label_mask,
)
from vllm_medusa.training.pieces import PieceTrainer
from vllm_medusa.training.recipe import Recipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Piece
from vllm_medusa.training.workers import Workers

PIECE_ROWS = 2048
PASS_ROWS = 4096  # of a pass, padding included


class _Rows(NamedTuple):
    """Rows of some pieces."""

    x: Tensor  # [N, K, H], the drafter's states, pieces one behind the other
    last: Tensor  # fp32 [N, H], what the target's LM head sees
    labels: Tensor  # int64 [N, K]
    temperatures: Tensor  # fp32 [N]


class Eagle3(PieceTrainer):
    """Trains a drafter; nothing of the target is changed."""

    heads: EagleDrafter

    def __init__(
        self,
        target: Target,
        drafter: EagleDrafter,  # fp32, changed in place; the target's embedding is bound
        train: HiddenStates,  # of whole texts, built: auxiliary states and the last
        heldout: HiddenStates | None,  # of the text to measure on, built
        records: Sequence[Record],  # of the text to train on
        heldout_records: Sequence[Record],
        recipe: Recipe,
        run: TrainingRun,
        workers: Workers,
        *,
        save_seconds: float = 60.0,  # between two states; the result doesn't depend on it
    ) -> None:
        """Prepare training."""
        super().__init__(
            drafter,
            train,
            heldout,
            recipe,
            run,
            workers,
            piece_rows=PIECE_ROWS,
            save_seconds=save_seconds,
        )
        own_dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        self.teacher = target_lm_head(target, dtype=own_dtype)
        self.width = target.hidden_size
        self._records = {id(train): records, id(heldout): heldout_records}

    def _usual_rows(self, pieces: Sequence[Piece]) -> int:
        return max(1, sum(map(len, pieces)) // max(1, len(pieces)))

    def _measure_pieces(self, pieces: Sequence[Piece], total: Measurement) -> None:
        assert self.heldout is not None
        for part in self._passes(pieces):
            with self.autocast():
                rows = self._rows(self.heldout, part)
                total.measure(self.heads, rows.last, rows.labels, x=rows.x)

    def _backward(self, pieces: Sequence[Piece], weights: Tensor) -> Tensor:
        sums = torch.zeros_like(weights)
        for part in self._passes(pieces):
            with self.autocast():
                found = self._losses(part, weights)
            found.loss.backward()
            sums += found.sums
        return sums

    def _losses(self, pieces: Sequence[Piece], weights: Tensor) -> HeadLosses:
        rows = self._rows(self.train_states, pieces)
        return head_losses(
            self.heads,
            rows.last,
            rows.labels,
            weights,
            temperatures=rows.temperatures if self.soft else None,
            teacher_lm_head=self.teacher,
            x=rows.x,
        )

    def _passes(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Pieces of like length together."""
        parts = split_passes(range(len(pieces)), [len(piece) for piece in pieces], PASS_ROWS)
        return [[pieces[i] for i in part] for part in parts]

    def _rows(self, source: HiddenStates, pieces: Sequence[Piece]) -> _Rows:
        texts, count, device = source.texts, self.heads.num_heads, self.workers.device
        wanted = [(p.span, *texts.needed(p, count, soft=True)) for p in pieces]
        sizes = [stop - start for _, start, stop in wanted]
        states = source.read(wanted).to(device)
        features, last = states.split([states.shape[1] - self.width, self.width], 1)
        after = [torch.from_numpy(texts.following(p, count, soft=True)) for p in pieces]
        there = pad_sequence([torch.ones(n, dtype=torch.bool) for n in sizes], batch_first=True)
        x = self.heads(
            pad_sequence(list(features.split(sizes)), batch_first=True),
            pad_sequence(after, batch_first=True).to(device),
            torch.tensor([p.start for p in pieces], device=device),
        )
        of_piece = torch.from_numpy(texts.temperatures[[texts.record_of(p) for p in pieces]])
        return _Rows(
            x[there.to(device)],
            last,
            torch.cat([self._labels_in(source, p) for p in pieces]).to(device),
            of_piece.repeat_interleave(torch.tensor(sizes)).to(device),
        )

    def _labels(self, piece: Piece) -> Tensor:
        return self._labels_in(self.train_states, piece)

    def _labels_in(self, source: HiddenStates, piece: Piece) -> Tensor:
        """Labels as heads have them: only of what the target wrote, and of the piece's own rows."""
        texts, count = source.texts, self.heads.num_heads
        record = self._records[id(source)][texts.record_of(piece)]
        ids = torch.tensor(record.token_ids)
        labels = head_labels(ids, label_mask(record.generated, len(ids), count))
        start, stop = texts.needed(piece, count, soft=True)
        found = labels[start:stop].clone()
        found[piece.stop - start :] = IGNORED
        return found

    def _sums(self, part: Piece) -> Tensor:
        with self.autocast():
            return self._losses([part], self.decay).sums

    def _keep(self, folder: Path) -> str:
        save_drafter(folder, self.heads, {"training": {"steps": self.step}})
        return "drafter's weights"
