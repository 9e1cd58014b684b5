"""The interface of a training method: batches of pieces, losses, accuracy on held-out text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_medusa.offline.records import Record
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.losses import (
    IGNORED,
    AnyHeads,
    LMHead,
    Teacher,
    head_losses,
    head_weights,
)
from vllm_medusa.training.options import StepOptions
from vllm_medusa.training.rows import Piece, labels_at, split_passes, tokens_after
from vllm_medusa.training.workers import Workers

Groups = list[tuple[Iterable[nn.Parameter], float]]


@dataclass(frozen=True)
class Texts:
    """Records, their hidden states (built), and the pieces to read."""

    records: Sequence[Record]
    pieces: Sequence[Piece]
    states: HiddenStates | None = None  # None: computed in each step


@dataclass(frozen=True)
class Setup:
    """What every method is given."""

    train: Texts
    heldout: Texts | None  # this process's share
    settings: StepOptions  # complete, see `recipe.complete`
    workers: Workers
    bf16: bool = False  # autocast; weights and sums stay fp32


class Batch(NamedTuple):
    """Rows of some pieces, concatenated."""

    texts: Texts
    wanted: list[tuple[int, int, int]]  # (record, start, stop) of each piece
    labels: Tensor  # int64 [N, M], see `losses.head_labels`
    counts: Tensor  # int64 [M], labels with a loss
    temperatures: Tensor  # fp32 [N]

    def tokens_after(self, num_heads: int) -> list[Tensor]:
        """The K tokens after each row: int64 [n, K] for each piece."""
        records = self.texts.records
        return [tokens_after(records[r], a, b, num_heads) for r, a, b in self.wanted]


class Method:
    """What a training method defines; the rest is in `loop.Loop`.

    To add one: a subclass, like `Medusa1`, `Medusa2` and `Eagle3`, created in `job.Job.heads_alone`
    or by its own driver selected by `train.train`; its name and its restrictions in
    `options.TrainOptions`; its defaults in `recipe.complete`; its option in `adapt.options`.

    Attributes:
        heads: the trained heads, fp32, updated in place.
        lengths: rows of each training piece.
        groups: pieces of one group stay adjacent; None: no groups.
        lm_head: over the draft vocabulary, for heads that store none.
        teacher: the target's LM head over the whole vocabulary, for soft labels.

    """

    pass_rows = 4096  # max rows per pass, padding included
    own = False  # whether labels have a column for the target's own next token
    measures_ends = False  # also measure before the first step and after the last
    groups: Sequence[int] | None = None
    lm_head: LMHead | None = None
    teacher: LMHead

    def __init__(self, heads: AnyHeads, setup: Setup) -> None:
        self.texts, self.heldout, self.settings = setup.train, setup.heldout, setup.settings
        self.workers, self.bf16 = setup.workers, setup.bf16
        self.heads = heads.to(self.workers.device).requires_grad_(True)
        self.soft = self.read_on = self.settings.labels == "soft"
        decay = head_weights(heads.num_heads, self.settings.decay)
        self.decay = decay.to(self.workers.device)  # [K]
        self.lengths = [piece.num_rows for piece in self.texts.pieces]
        if self.texts.states is not None:
            self.groups = self.texts.states.groups(self.texts.pieces)

    def parameters(self) -> Groups:
        """Parameter groups for the optimizer, with factors of the learning rate."""
        return [(self.heads.parameters(), 1.0)]

    def state(self) -> dict[str, Any]:
        """Weights to keep in a checkpoint."""
        return {"heads": self.heads.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the output of `state`."""
        self.heads.load_state_dict(state["heads"])

    def weights(self, step: int, steps: int) -> Tensor:
        """The factor of each mean loss at a step: fp32 [M]."""
        return self.decay

    def autocast(self) -> torch.autocast:
        """Compute in bfloat16 if requested."""
        kind = self.workers.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def collate(self, items: Sequence[int], texts: Texts | None = None) -> Batch:
        """A batch of some pieces; ``texts``: other texts than the training texts."""
        texts = texts or self.texts
        count, wanted, labels, temperatures = self.heads.num_heads, [], [], []
        for number, start, own_stop, limit in (texts.pieces[item] for item in items):
            record = texts.records[number]
            stop = min(own_stop + count, limit) if self.read_on else own_stop
            found = labels_at(record, start, stop, count, own=self.own)
            if own_stop < limit - 1:  # otherwise no head has a label there
                found[own_stop - start :] = IGNORED
            heat = 1.0 if record.temperature is None else record.temperature
            temperatures.append(torch.full((stop - start,), heat))
            wanted.append((number, start, stop))
            labels.append(found)
        whole = torch.cat(labels)
        counted = whole != IGNORED
        if self.heads.token_map is not None and not self.soft:
            drafted = torch.isin(whole, self.heads.token_map.cpu())
            drafted[:, : int(self.own)] = True
            counted &= drafted
        device = self.workers.device
        heats = torch.cat(temperatures).to(device)
        return Batch(texts, wanted, whole.to(device), counted.sum(0), heats)

    def states(self, batch: Batch) -> Tensor:
        """The target's states of a batch, from the stored ones: [N, H]."""
        assert batch.texts.states is not None
        return batch.texts.states.read(batch.wanted).to(self.workers.device)

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs of the target's LM head [N, H], and the heads' outputs [N, K, H]."""
        last = self.states(batch)
        return last, self.heads(last)

    def loss(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of a batch's losses, and each one's sum in nats, detached [M]."""
        last, x = self.outputs(batch)
        teacher = self.teacher_of(batch, last) if self.soft else None
        return head_losses(self.heads, x, batch.labels, weights, self.lm_head, teacher=teacher)

    def teacher_of(self, batch: Batch, states: Tensor) -> Teacher:
        """The source of soft labels from the target's own states [N, H]."""
        return Teacher(states, self.teacher, batch.temperatures, self.heads.token_map)

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Loss and top-1 ... top-10 accuracy of every head on held-out text, plain JSON."""
        if self.heldout is None:
            return None
        total = Measurement(self.heads.num_heads)
        lengths = [piece.num_rows for piece in self.heldout.pieces]
        for part in split_passes(range(len(lengths)), lengths, self.pass_rows):
            batch = self.collate(part, self.heldout)
            with self.autocast():
                _, x = self.outputs(batch)
                total.measure(self.heads, x, batch.labels, self.lm_head)
        total.sums = self.workers.add_up(total.sums).cpu()
        return {"heldout": total.summary()}

    def entry(self, means: Tensor, weights: Tensor) -> dict[str, Any]:
        """The log entry for a step's mean losses [M]."""
        return {"losses": [round(value, 5) for value in means.tolist()]}

    def lines(self, items: Sequence[int]) -> list[int]:
        """Lines of the data from which pieces come, ascending."""
        pieces = [self.texts.pieces[item] for item in items]
        return sorted({self.texts.records[piece.record].line for piece in pieces})
