"""Which pieces of text a step trains on: a function of seed and step alone, so that runs resume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Order:
    """All pieces, shuffled anew in every epoch and cut into steps.

    The rows of all epochs make one stream, of which each step takes ``batch_rows``; a piece belongs
    to the step in which it begins, and the last step takes the rest. Pieces of one group stay
    neighbours.
    """

    def __init__(
        self,
        rows: Sequence[int],  # the P pieces' lengths, none above ``batch_rows``: no step is empty
        groups: Sequence[int],  # each piece's, numbered from 0
        *,
        batch_rows: int,  # a step
        epochs: int,
        seed: int,
    ) -> None:
        """Prepare the order."""
        self.rows = np.asarray(rows, np.int64)
        self.groups = np.asarray(groups, np.int64)
        self.batch_rows, self.epochs, self.seed = batch_rows, epochs, seed
        self.total = int(self.rows.sum())
        assert len(self.rows) and self.rows.max() <= batch_rows, "a step could be empty"
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return max(1, self.total * self.epochs // self.batch_rows)

    def pieces(self, step: int) -> list[int]:
        """Indices of a step's pieces."""
        low, high = step * self.batch_rows, (step + 1) * self.batch_rows
        if step == self.steps - 1:
            high = self.total * self.epochs
        found: list[int] = []
        for epoch in range(low // self.total, (high - 1) // self.total + 1):
            order, starts = self._epoch(epoch)
            first, last = np.searchsorted(starts, np.array([low, high]) - epoch * self.total)
            found += order[first:last].tolist()
        return found

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pieces in the epoch's order, and where each begins in its stream."""
        if epoch not in self._epochs:
            generator = np.random.default_rng([self.seed, epoch])
            shuffled = generator.permutation(int(self.groups.max()) + 1)
            order = np.argsort(shuffled[self.groups], kind="stable")
            ends = np.cumsum(self.rows[order])
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}
            self._epochs[epoch] = order, ends - self.rows[order]
        return self._epochs[epoch]


def split(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Cut a list of lengths into ``parts`` runs of about as many rows: the positions in each.

    There may be fewer pieces than parts: then some are empty.
    """
    starts = np.cumsum([0, *rows])
    part_of = starts[:-1] * parts // max(1, int(starts[-1]))
    return [np.flatnonzero(part_of == part).tolist() for part in range(parts)]
