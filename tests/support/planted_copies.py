"""In place of what lookup finds: the future of chaotic texts, which never repeat themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_medusa.lookup import lookup, on_device

_LAST = 6  # tokens that tell where in a text a request is


class PlantedCopies:
    """Knows how texts go on, and is wrong now and then."""

    def __init__(self, texts: Sequence[Sequence[int]], shift: int = 0) -> None:
        """Take in whole ``texts``; what is planted is ``shift`` tokens off."""
        self._rng, self._shift = random.Random(0), shift
        self._after = {
            tuple(text[end - _LAST : end]): list(text[end:])
            for text in texts
            for end in range(_LAST, len(text))
        }

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """From now on this is what lookup finds."""
        patch.setattr(lookup, "longest_match", self._match)
        patch.setattr(lookup, "continuation", self._continuation)
        patch.setattr(on_device, "continuations", self._of_batch)

    def _match(self, tokens: np.ndarray) -> tuple[int, int]:
        known = tuple(tokens[-_LAST:].tolist()) in self._after
        return (20, len(tokens) - _LAST) if known else (0, 0)

    def _continuation(self, tokens: np.ndarray, start: int, count: int, _: int) -> np.ndarray:
        future = self._after[tuple(tokens[start:].tolist())][self._shift :][:count]
        return np.array([t if self._rng.random() < 0.98 else 3 for t in future], dtype=np.int64)

    def _of_batch(
        self, texts: Tensor, slots: Tensor, lengths: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        matched, found = torch.zeros_like(lengths), torch.full((len(slots), count), -1)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            tokens = texts[slot, :length].numpy()
            matched[row], start = self._match(tokens)
            if matched[row]:
                future = self._continuation(tokens, start, count, 0)
                found[row, : len(future)] = torch.from_numpy(future)
        return matched, found
