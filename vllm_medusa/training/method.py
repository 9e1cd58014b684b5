"""The interface of a training method: batches of pieces, losses, accuracy on held-out text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.hidden_cache import HiddenStates
from vllm_medusa.training.losses import AnyHeads, LMHead, Teacher, head_losses, head_weights
from vllm_medusa.training.options import StepOptions
from vllm_medusa.training.rows import IGNORED, Piece, Texts, split_passes
from vllm_medusa.training.workers import Workers

Groups = list[tuple[Iterable[nn.Parameter], float]]


@dataclass(frozen=True)
class Data:
    """Texts, the pieces to read, and their hidden states (built)."""

    texts: Texts
    pieces: Sequence[Piece]
    states: HiddenStates | None = None  # None: computed in each step

    @property
    def lengths(self) -> list[int]:
        """Rows of each piece."""
        return [piece.num_rows for piece in self.pieces]

    def passes(self, size: int, items: Sequence[int] | None = None) -> list[list[Piece]]:
        """Some or all pieces in passes of at most ``size`` padded rows."""
        lengths = self.lengths
        items = range(len(lengths)) if items is None else items
        return [[self.pieces[i] for i in part] for part in split_passes(items, lengths, size)]


class Batch(NamedTuple):
    """Rows of some pieces, concatenated."""

    data: Data
    spans: list[tuple[int, int]]  # rows [start, stop) of each piece
    rows: Tensor  # int64 [N], positions in the texts
    labels: Tensor  # int64 [N, M], see `Texts.labels`
    counts: Tensor  # int64 [M], labels with a loss
    temperatures: Tensor  # fp32 [N]

    @property
    def sizes(self) -> list[int]:
        """Rows of each piece."""
        return [stop - start for start, stop in self.spans]


class Method:
    """What a training method defines; the rest is in `loop.Loop`.

    To add one, write a subclass, like `Medusa1`, `Medusa2` and `Eagle3`. Create it in
    `job.Job.create_method`, or in its own driver selected by `train.train`. Add its name and its
    restrictions to `options.TrainOptions`, its defaults to `recipe.complete`, and its option to
    `adapt.options`.

    Attributes:
        heads: the trained heads, fp32, updated in place.
        lm_head: over the draft vocabulary, for heads that store none.
        teacher: the target's LM head over the whole vocabulary, for soft labels.

    """

    pass_rows = 4096  # max rows per pass, padding included
    own = False  # whether labels have a column for the target's own next token
    measures_ends = False  # also measure before the first step and after the last
    lm_head: LMHead | None = None
    teacher: LMHead

    def __init__(
        self,
        heads: AnyHeads,
        data: Data,
        heldout: Data | None,  # this process's share
        step_options: StepOptions,  # complete, see `recipe.complete`
        workers: Workers,
        bf16: bool = False,  # autocast; weights and sums stay fp32
    ) -> None:
        self.data, self.heldout, self.step_options = data, heldout, step_options
        self.workers, self.bf16 = workers, bf16
        self.heads = heads.to(self.workers.device).requires_grad_(True)
        self.soft = self.step_options.labels == "soft"
        decay = head_weights(heads.num_heads, self.step_options.decay)
        self.decay = decay.to(self.workers.device)  # [K]

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

    def collate(self, pieces: Sequence[Piece], data: Data | None = None) -> Batch:
        """Batch some pieces, of the training texts or of ``data``.

        Each piece reads the K rows after it, whose states give the soft labels of its last rows.
        """
        data = data or self.data
        texts, count = data.texts, self.heads.num_heads
        spans = [(p.start, min(p.stop + count, p.limit)) for p in pieces]
        sizes = torch.tensor([stop - start for start, stop in spans])
        rows = torch.cat([torch.arange(start, stop) for start, stop in spans])
        labels = texts.labels(rows, count, own=self.own)
        labels[rows >= torch.tensor([p.stop for p in pieces]).repeat_interleave(sizes)] = IGNORED
        counted = labels != IGNORED
        if self.heads.token_map is not None and not self.soft:
            drafted = torch.isin(labels, self.heads.token_map.cpu())
            drafted[:, : int(self.own)] = True
            counted &= drafted
        known = [texts.records[texts.record_of(start)].temperature for start, _ in spans]
        temperatures = torch.tensor([1.0 if t is None else t for t in known])
        device = self.workers.device
        temperatures = temperatures.repeat_interleave(sizes).to(device)
        return Batch(data, spans, rows, labels.to(device), counted.sum(0), temperatures)

    def states(self, batch: Batch) -> Tensor:
        """The target's states of a batch, from the stored ones: [N, H]."""
        assert batch.data.states is not None
        return batch.data.states.read(batch.spans).to(self.workers.device)

    def path(self, batch: Batch) -> Tensor:
        """The K tokens after each row: int64 [N, K]."""
        return batch.data.texts.after(batch.rows, self.heads.num_heads).to(self.workers.device)

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs of the target's LM head [N, H], and the heads' outputs [N, K, H]."""
        raise NotImplementedError

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
        for pieces in self.heldout.passes(self.pass_rows):
            batch = self.collate(pieces, self.heldout)
            with self.autocast():
                _, x = self.outputs(batch)
                total.measure(self.heads, x, batch.labels, self.lm_head)
        total.sums = self.workers.add_up(total.sums).cpu()
        return {"heldout": total.summary()}

    def entry(self, means: Tensor, weights: Tensor) -> dict[str, Any]:
        """The log entry for a step's mean losses [M]."""
        return {"losses": [round(value, 5) for value in means.tolist()]}
