"""Split records into pieces, assign pieces to steps, and split steps into passes.

The state at position t predicts token t + 1, so a generated span [s, e) has the rows t = s - 1 ...
e - 2. The label of head h at t is token t + h + 2 of the same span. Prompts need not be read::

    text     p p p A B C D p p      span [3, 7), rows 2 ... 5
    row 2        ^ a b c d          heads' labels B C D
    row 4            ^              heads' labels D
    row 5              ^            no label: only the distribution over D
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_medusa.offline.records import Record
from vllm_medusa.training.losses import head_labels


class Piece(NamedTuple):
    """Rows ``start`` ... ``stop`` - 1 of a record; the span's rows end before ``limit``."""

    record: int
    start: int
    stop: int
    limit: int

    @property
    def num_rows(self) -> int:
        """Rows with a label."""
        return self.stop - self.start


def cut_pieces(records: Sequence[Record], size: int, *, whole: bool = False) -> list[Piece]:
    """Split all rows with a label into pieces of at most ``size`` rows.

    ``whole``: from the record's first position on, prompts included, as for EAGLE-3.
    """
    pieces = []
    for number, record in enumerate(records):
        for start, end in row_ranges(record, whole=whole):
            for at in range(start, end - 1, size):
                pieces.append(Piece(number, at, min(at + size, end - 1), end))
    return pieces


def row_ranges(record: Record, *, whole: bool = False) -> list[tuple[int, int]]:
    """Rows [start, end) of each span that is long enough for a label; see `cut_pieces`."""
    spans = [(max(start - 1, 0), end - 1) for start, end in record.generated]
    if whole:
        spans = [(0, spans[-1][1])]
    return [(start, end) for start, end in spans if end - start >= 2]


def labels_at(
    record: Record, start: int, stop: int, num_heads: int, *, own: bool = False
) -> Tensor:
    """`head_labels` at positions [start, stop): int64 [n, K or 1 + K]."""
    ids = torch.tensor(record.token_ids[start : stop + num_heads + 1])
    spans = [(s - start, e - start) for s, e in record.generated if e > start]
    return head_labels(ids, spans, num_heads, own=own)[: stop - start]


def tokens_after(record: Record, start: int, stop: int, num_heads: int) -> Tensor:
    """The K tokens after each of the positions [start, stop): int64 [n, K].

    Past the end of the text the last token is repeated; no head has a label there.
    """
    ids = torch.tensor(record.token_ids[start + 1 : stop + num_heads])
    at = torch.arange(stop - start)[:, None] + torch.arange(num_heads)
    return ids[at.clamp(max=len(ids) - 1)]


def count_labels(records: Sequence[Record]) -> int:
    """Number of labels of head 0."""
    return sum(end - start - 1 for record in records for start, end in row_ranges(record))


def plan_steps(
    lengths: Sequence[int],  # rows or tokens of each item
    groups: Sequence[int] | None = None,  # items of one group stay adjacent
    *,
    batch: int,  # rows or tokens per step
    epochs: int,
    seed: int,
) -> list[list[int]]:
    """Assign items to steps, in a new order in each epoch; a pure function, so runs can resume.

    The rows of all epochs are one stream, of which a step takes ``batch``; an item belongs to the
    step in which it starts. The last step takes the rest. Returns the items of each step.
    """
    size, group = np.asarray(lengths, np.int64), np.arange(len(lengths))
    if groups is not None:
        group = np.asarray(groups, np.int64)
    orders = []
    for epoch in range(epochs):
        shuffled = np.random.default_rng([seed, epoch]).permutation(int(group.max()) + 1)
        orders.append(np.argsort(shuffled[group], kind="stable"))
    order = np.concatenate(orders)
    starts = np.cumsum(size[order]) - size[order]
    count = max(1, int(size.sum()) * epochs // batch)
    step = np.minimum(starts // batch, count - 1)
    steps = np.split(order, np.searchsorted(step, np.arange(1, count)))
    return [items.tolist() for items in steps if len(items)]


def deal(items: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into ``parts`` runs of about equal total length; some may be empty."""
    ends = np.cumsum([lengths[item] for item in items])
    part = (ends - [lengths[item] for item in items]) * parts // max(1, int(ends[-1]))
    return [[items[i] for i in np.flatnonzero(part == number)] for number in range(parts)]


def split_passes(items: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Split items into passes of at most ``size`` padded rows, longest first; longer ones alone.

    Items of similar length are grouped.
    """
    passes: list[list[int]] = []
    for item in sorted(items, key=lambda i: (-lengths[i], i)):
        if passes and (len(passes[-1]) + 1) * lengths[passes[-1][0]] <= size:
            passes[-1].append(item)
        else:
            passes.append([item])
    return passes


def pad(texts: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Texts padded on the right: token ids and attention mask, int64 [B, L] each."""
    rows = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
    masks = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
