"""Replaces lookup's results by future tokens of chaotic texts, which never repeat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vllm_medusa.lookup import lookup

_LAST = 6  # tokens that identify a position in a text


class PlantedCopies:
    """Returns the continuations of known texts, which are sometimes wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], shift: int = 0) -> None:
        """Store complete ``texts``; planted tokens are ``shift`` positions off."""
        self._rng, self._shift = random.Random(0), shift
        self._after = {
            tuple(text[end - _LAST : end]): list(text[end:])
            for text in texts
            for end in range(_LAST, len(text))
        }

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(lookup, "continuations", self._of_batch)

    def _of_batch(self, texts: Any, rows: Any, lengths: Any, count: int) -> tuple[Any, Any]:
        matched, found = np.zeros(len(rows), np.int64), np.full((len(rows), count), -1)
        for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            future = self._after.get(tuple(texts[row, length - _LAST : length].tolist()))
            if future is not None:
                future = future[self._shift :][:count]
                tokens = [token if self._rng.random() < 0.98 else 3 for token in future]
                matched[place], found[place, : len(tokens)] = 20, tokens
        if isinstance(texts, torch.Tensor):
            return torch.from_numpy(matched), torch.from_numpy(found)
        return matched, found
