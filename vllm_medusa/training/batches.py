"""Which texts each step trains, and how a step is cut into passes that fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def plan_steps(
    lengths: Sequence[int],  # tokens of each text
    *,
    epochs: int,
    step_tokens: int,
    seed: int,  # of the orders
    steps: int | None = None,  # at most so many
) -> list[list[int]]:
    """Deal texts to steps; a pure function of its arguments, so that a run can go on anywhere.

    Every epoch has all texts once, in an order of its own. A step takes texts until the next would
    be beyond ``step_tokens``, and always one; the last step of an epoch may be short. Returns for
    each step the indices of its texts.
    """
    found: list[list[int]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed((seed << 16) + epoch)
        step: list[int] = []
        tokens = 0
        for text in torch.randperm(len(lengths), generator=generator).tolist():
            if step and tokens + lengths[text] > step_tokens:
                found.append(step)
                step, tokens = [], 0
            step.append(text)
            tokens += lengths[text]
        if step:
            found.append(step)
        if steps is not None and len(found) >= steps:
            return found[:steps]
    return found


def split_passes(texts: Sequence[int], lengths: Sequence[int], pass_tokens: int) -> list[list[int]]:
    """Cut a step's ``texts`` into passes of at most ``pass_tokens`` padded tokens, longest first.

    Texts of like length go together. A text longer than that goes alone.
    """
    passes: list[list[int]] = []
    for text in sorted(texts, key=lambda t: (-lengths[t], t)):
        if passes and (len(passes[-1]) + 1) * lengths[passes[-1][0]] <= pass_tokens:
            passes[-1].append(text)
        else:
            passes.append([text])
    return passes


def pad(texts: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Texts padded on the right: token ids and attention mask, int64 [B, L] each."""
    rows = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
    masks = [torch.ones_like(row) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)
