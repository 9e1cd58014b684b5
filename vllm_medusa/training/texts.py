"""Records laid out as rows: only the positions whose states the heads are trained on.

A generated span [s, e) of a text has the rows t = s - 1 ... e - 2: the state at s - 1 predicts the
span's first token, the one at e - 2 its last. The label of head h in the span's row i is the span's
token i + h + 1, so row i counts for head h if and only if i + h + 2 <= n, n the span's rows; the
distribution over that label is what the target makes of row i + h + 1. So spans can be cut into
pieces, shuffled and put one behind the other, and no prompt is ever read::

    text     p p p A B C D p p          span [3, 7), rows 2 ... 5, n = 4
    row 0    . . ^ a b c d              state at 2; heads' labels B C D
    row 2            ^                  state at 4; heads' labels D
    row 3              ^                state at 5; no label: only the distribution over D
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_medusa.offline.records import Record
from vllm_medusa.training.losses import IGNORED


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` ... ``stop`` - 1 of a span, all of which have a label."""

    span: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Texts:
    """R records with S spans that have labels, N rows and T tokens in all."""

    ids: np.ndarray  # int32 [T], all records' tokens one behind the other
    first_id: np.ndarray  # int64 [R + 1], where each record begins in ``ids``
    lines: np.ndarray  # int64 [R], each record's line in its file
    temperatures: np.ndarray  # fp32 [R]; 1 for text that the target didn't sample
    span_record: np.ndarray  # int64 [S]
    span_position: np.ndarray  # int64 [S], the text position of a span's row 0
    first_row: np.ndarray  # int64 [S + 1], where each span's rows begin among all rows

    @classmethod
    def of(cls, records: Sequence[Record]) -> Texts:
        """Lay out ``records``; spans too short for any label are left out."""
        spans = [
            (number, max(start - 1, 0), end - 1 - max(start - 1, 0))
            for number, record in enumerate(records)
            for start, end in record.generated
        ]
        table = np.array([span for span in spans if span[2] >= 2], np.int64).reshape(-1, 3)
        flat = (token for record in records for token in record.token_ids)
        sampled_at = [1.0 if r.temperature is None else r.temperature for r in records]
        return cls(
            ids=np.fromiter(flat, np.int32),
            first_id=_starts([len(record.token_ids) for record in records]),
            lines=np.array([record.line for record in records], np.int64),
            temperatures=np.array(sampled_at, np.float32),
            span_record=table[:, 0],
            span_position=table[:, 1],
            first_row=_starts(table[:, 2]),
        )

    @classmethod
    def whole(cls, records: Sequence[Record]) -> Texts:
        """Lay out ``records`` with all rows up to the last that is generated: prompts too."""
        ends = [max((end for _, end in record.generated), default=0) for record in records]
        return cls.of(
            [replace(r, generated=((0, end),)) for r, end in zip(records, ends, strict=True)]
        )

    @property
    def num_records(self) -> int:
        """R."""
        return len(self.lines)

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.first_row[-1])

    @property
    def num_labels(self) -> int:
        """Rows with a label for head 0."""
        return self.num_rows - len(self.span_record)

    def digest(self) -> str:
        """SHA-256 of everything that training depends on, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.ids, self.first_id, self.temperatures, self.span_record):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(self.span_position.tobytes() + self.first_row.tobytes())
        return digest.hexdigest()

    def token_ids(self, record: int) -> np.ndarray:
        """A record's tokens, int32, without what follows its last row."""
        spans = slice(*np.searchsorted(self.span_record, [record, record + 1]))
        last = self.span_position[spans] + np.diff(self.first_row)[spans]
        first, end = self.first_id[record : record + 2]
        return self.ids[first : min(end, first + last.max(initial=0))]

    def pieces(self, size: int) -> list[Piece]:
        """Cut all rows that have a label into pieces of at most ``size`` rows, in order."""
        return [
            Piece(span, start, min(start + size, labelled))
            for span, labelled in enumerate(np.diff(self.first_row) - 1)
            for start in range(0, int(labelled), size)
        ]

    def needed(self, piece: Piece, num_heads: int, *, soft: bool) -> tuple[int, int]:
        """Rows [start, stop) of the span whose states a piece needs; soft labels need some more."""
        rows = int(self.first_row[piece.span + 1] - self.first_row[piece.span])
        return piece.start, min(piece.stop + num_heads, rows) if soft else piece.stop

    def labels(self, piece: Piece, num_heads: int, *, soft: bool) -> np.ndarray:
        """Labels of the rows that `needed` names: int64 [n, K], `IGNORED` where there is none."""
        start, stop = self.needed(piece, num_heads, soft=soft)
        rows = int(self.first_row[piece.span + 1] - self.first_row[piece.span])
        row = np.arange(start, stop)[:, None]
        ahead = row + np.arange(num_heads) + 2  # [n, K]; from the text position of row 0
        counts = (ahead <= rows) & (row < piece.stop)
        record = self.span_record[piece.span]
        base = self.first_id[record] + self.span_position[piece.span]
        return np.where(counts, self.ids[base + np.minimum(ahead, rows)], IGNORED).astype(np.int64)

    def following(self, piece: Piece, num_heads: int, *, soft: bool) -> np.ndarray:
        """The text after the rows that `needed` names: int64 [n, K], any token behind the span.

        What heads that see tokens are shown; a head that has a label sees the span's only.
        """
        start, stop = self.needed(piece, num_heads, soft=soft)
        rows = int(self.first_row[piece.span + 1] - self.first_row[piece.span])
        ahead = np.arange(start, stop)[:, None] + np.arange(num_heads) + 1  # [n, K]
        record = self.span_record[piece.span]
        base = self.first_id[record] + self.span_position[piece.span]
        return self.ids[base + np.minimum(ahead, rows)].astype(np.int64)

    def record_of(self, piece: Piece) -> int:
        """Which record a piece is of."""
        return int(self.span_record[piece.span])

    def lines_of(self, pieces: Sequence[Piece]) -> list[int]:
        """Lines of the records that pieces are of, ascending."""
        return sorted({int(self.lines[self.record_of(piece)]) for piece in pieces})


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
