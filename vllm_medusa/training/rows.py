"""Texts as one sequence of tokens, its pieces and their labels, and the pieces of steps and passes.

The state at position t predicts token t + 1, so a generated span [s, e) has the rows t = s - 1 ...
e - 2. The label of head h at t is token t + h + 2 of the same span. Prompts need not be read::

    text     p p p A B C D p p      span [3, 7), rows 2 ... 5
    row 2        ^ a b c d          heads' labels B C D
    row 4            ^              heads' labels D
    row 5              ^            no label: only the distribution over D
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_medusa.offline.records import Record

IGNORED = -100  # not a label
WHOLE = 1 << 31  # the size of pieces that are not cut


class Piece(NamedTuple):
    """Rows ``start`` ... ``stop`` - 1 of all texts; its span's rows end before ``limit``."""

    start: int
    stop: int
    limit: int

    @property
    def num_rows(self) -> int:
        """Rows whose labels belong to this piece."""
        return self.stop - self.start


class Texts:
    """Texts one after another; positions count from the first token of the first text.

    Attributes:
        records: the texts.
        first: position of each text's first token, and the end: int64 [R + 1].
        tokens: int64 [T].
        ends: int64 [T], the end of the generated span of token t + 1; 0: it was not generated.

    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        lengths = [len(record.token_ids) for record in records]
        self.first = np.array([0, *accumulate(lengths)], np.int64)
        ids = array("q", chain.from_iterable(record.token_ids for record in records))
        self.tokens = torch.tensor(ids, dtype=torch.int64)
        self.ends = torch.zeros_like(self.tokens)
        for first, record in zip(self.first.tolist(), records, strict=False):
            for start, end in record.generated:
                self.ends[first + max(start - 1, 0) : first + end - 1] = first + end

    def cut(self, size: int, *, whole: bool = False) -> list[Piece]:
        """All spans with a label for head 0, in pieces of at most ``size`` rows.

        ``whole``: from each text's first position to its last span, prompts included.
        """
        return [
            Piece(at, min(at + size, end), end)
            for start, end in self.spans(whole=whole)
            for at in range(start, end, size)
        ]

    def spans(self, *, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Rows [start, end) of each span with a label for head 0; see `cut`."""
        for first, record in zip(self.first.tolist(), self.records, strict=False):
            spans = [(first + max(s - 1, 0), first + e - 1) for s, e in record.generated]
            if whole:
                spans = [(first, spans[-1][1])]
            yield from ((start, end) for start, end in spans if end - start >= 2)

    def record_of(self, position: int) -> int:
        """The index of the text that contains a position."""
        return int(np.searchsorted(self.first, position, "right")) - 1

    def labels(self, rows: Tensor, num_heads: int, *, own: bool = False) -> Tensor:
        """The token that each head should predict at positions [N]: int64 [N, K or 1 + K].

        The label of head h at t is valid if and only if the root t + 1 and the label t + h + 2 are
        in the same generated span, as in serving. Otherwise it is `IGNORED`. ``own``: a first
        column for the target's own next token.
        """
        label = rows[:, None] + torch.arange(-int(own), num_heads) + 2
        found = self.tokens[label.clamp(max=len(self.tokens) - 1)]
        return found.masked_fill(label >= self.ends[rows, None], IGNORED)

    def after(self, rows: Tensor, num_heads: int) -> Tensor:
        """The K tokens after each position: int64 [N, K]; tokens of another text have no label."""
        at = rows[:, None] + torch.arange(num_heads) + 1
        return self.tokens[at.clamp(max=len(self.tokens) - 1)]

    def count_labels(self) -> int:
        """Number of labels of head 0."""
        return sum(end - start - 1 for start, end in self.spans())


def plan_steps(
    lengths: Sequence[int],  # rows or tokens of each item
    groups: Sequence[int] | None = None,  # items of one group stay adjacent
    *,
    batch: int,  # rows or tokens per step
    epochs: int,
    seed: int,
) -> list[list[int]]:
    """Assign items to steps, in a new order in each epoch; a pure function, so runs can resume.

    The rows of all epochs form one stream, of which each step takes the next ``batch`` rows; an
    item belongs to the step in which it starts. The last step takes the rest. Returns the items of
    each step.
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
    """Split items into passes of at most ``size`` padded rows, longest first.

    Items of similar length are grouped; an item longer than ``size`` has a pass of its own.
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
