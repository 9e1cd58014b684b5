"""Heads on a frozen target, trained on pieces of text whose hidden states are kept.

What Medusa-1 (and Hydra) and EAGLE-3 share: only the heads are given to the optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_medusa.offline.records import Record
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.loop import Method
from vllm_medusa.training.losses import IGNORED, AnyHeads, LMHead, head_losses
from vllm_medusa.training.options import StepOptions
from vllm_medusa.training.rows import Piece, labels_at, split_passes, tokens_after
from vllm_medusa.training.workers import Workers


@dataclass(frozen=True)
class Texts:
    """Records, their hidden states (built), and the pieces of them that are read."""

    records: Sequence[Record]
    states: HiddenStates
    pieces: Sequence[Piece]


class Batch(NamedTuple):
    """Rows of some pieces, concatenated."""

    texts: Texts
    wanted: list[tuple[int, int, int]]  # (record, start, stop) of each piece
    labels: Tensor  # int64 [N, K]
    counts: Tensor  # int64 [K], labels that have a loss
    temperatures: Tensor  # fp32 [N]

    def tokens_after(self, num_heads: int) -> list[Tensor]:
        """The K tokens after each row: int64 [n, K] of each piece."""
        records = self.texts.records
        return [tokens_after(records[r], a, b, num_heads) for r, a, b in self.wanted]


class Inputs(NamedTuple):
    """What `head_losses` takes of a batch."""

    last: Tensor  # [N, H], what the target's LM head sees
    path: Tensor | None = None  # int64 [N, K], for Hydra heads
    x: Tensor | None = None  # [N, K, H], the heads' states, where they don't follow from `last`


class PieceMethod(Method):
    """A method that reads pieces."""

    pass_rows = 4096
    lm_head: LMHead | None  # over the draft vocabulary, for heads that store none
    teacher: LMHead  # over the whole vocabulary, for soft labels

    def __init__(
        self,
        heads: AnyHeads,  # fp32, changed in place
        train: Texts,
        heldout: Texts | None,  # this process's share
        settings: StepOptions,
        workers: Workers,
        bf16: bool,
    ) -> None:
        super().__init__(heads, settings, workers, bf16)
        self.train_texts, self.heldout = train, heldout
        self.read_on = self.soft  # whether to read the K rows after a piece's own as well
        self.lengths = [piece.num_rows for piece in train.pieces]
        self.groups = train.states.groups(train.pieces)

    @abstractmethod
    def inputs(self, batch: Batch) -> Inputs:
        """States of a batch."""

    def collate(self, items: Sequence[int]) -> Batch:
        """See `Method`."""
        return self._collate(self.train_texts, items)

    def loss(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method`."""
        inputs = self.inputs(batch)
        found = head_losses(
            self.heads,
            inputs.last,
            batch.labels,
            weights,
            self.lm_head,
            temperatures=batch.temperatures if self.soft else None,
            teacher_lm_head=self.teacher,
            path=inputs.path,
            x=inputs.x,
        )
        return found.loss, found.sums

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Loss and top-1 ... top-10 accuracy of every head on held-out text."""
        if self.heldout is None:
            return None
        total = Measurement.empty(self.heads.num_heads)
        lengths = [piece.num_rows for piece in self.heldout.pieces]
        for part in split_passes(range(len(lengths)), lengths, self.pass_rows):
            batch = self._collate(self.heldout, part)
            with self.autocast():
                inputs = self.inputs(batch)
                total.measure(
                    self.heads, inputs.last, batch.labels, self.lm_head, inputs.path, inputs.x
                )
        packed = self.workers.add_up(total.packed())
        return {"heldout": Measurement.unpacked(packed.cpu(), self.heads.num_heads).summary()}

    def lines(self, items: Sequence[int]) -> set[int]:
        """See `Method`."""
        texts = self.train_texts
        return {texts.records[texts.pieces[item].record].line for item in items}

    def _collate(self, texts: Texts, items: Sequence[int]) -> Batch:
        count, wanted, labels = self.heads.num_heads, [], []
        for piece in (texts.pieces[item] for item in items):
            stop = min(piece.stop + count, piece.limit) if self.read_on else piece.stop
            found = labels_at(texts.records[piece.record], piece.start, stop, count)
            found[piece.num_rows :] = IGNORED
            wanted.append((piece.record, piece.start, stop))
            labels.append(found)
        heat = [texts.records[record].temperature for record, _, _ in wanted]
        sizes = torch.tensor([stop - start for _, start, stop in wanted])
        temperatures = torch.tensor([1.0 if t is None else t for t in heat])
        whole = torch.cat(labels)
        counted = whole != IGNORED
        if self.heads.token_map is not None and not self.soft:
            counted &= torch.isin(whole, self.heads.token_map.cpu())
        device = self.workers.device
        return Batch(
            texts,
            wanted,
            whole.to(device),
            counted.sum(0),
            temperatures.repeat_interleave(sizes).to(device),
        )
