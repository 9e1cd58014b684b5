"""How much a trained target differs from the original: perplexity and KL on held-out text.

Measured at the positions whose next token was generated, at temperature 1, in nats. Logits of only
a few positions exist at a time, [C, V] of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_medusa.training.losses import CHUNK, LMHead
from vllm_medusa.training.options import JointOptions
from vllm_medusa.training.rows import IGNORED


def shortfalls(quality: Mapping[str, float], bounds: JointOptions) -> list[str]:
    """Messages about exceeded bounds of a `QualityMeter.result`; NaN exceeds any bound."""
    ratio = "perplexity after / before"
    checks = (
        ("KL(original || new) per token", quality["kl"], bounds.max_kl, "--max-kl"),
        (ratio, quality["perplexity_ratio"], bounds.max_perplexity_ratio, "--max-perplexity-ratio"),
    )
    return [
        f"{what} is {value:.4g}; the limit is {limit:g} ({option})"
        for what, value, limit, option in checks
        if not value <= limit
    ]


def kl_rows(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of each row: logits [C, V] each -> fp32 [C].

    Exactly 0 if the rows are equal.
    """
    p, q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class QualityMeter:
    """Sums over held-out texts, fp64 [4], additive over processes."""

    def __init__(self, lm_head: LMHead) -> None:
        self.lm_head, self.sums = lm_head, torch.zeros(4, dtype=torch.float64)

    @torch.no_grad()
    def add(
        self,
        following: Tensor,  # int64 [N], the next token, or `IGNORED`
        before: Tensor,  # [N, H], LM head inputs of the original
        after: Tensor,  # [N, H], LM head inputs of the new model
    ) -> None:
        """Add some positions."""
        (positions,) = (following != IGNORED).nonzero(as_tuple=True)
        for at in positions.split(CHUNK):
            old, new = (self.lm_head(states[at]).float() for states in (before, after))  # [C, V]
            rows = (
                torch.ones(len(at)),
                F.cross_entropy(old, following[at], reduction="none"),
                F.cross_entropy(new, following[at], reduction="none"),
                kl_rows(old, new),
            )
            self.sums += torch.stack([row.double().sum().cpu() for row in rows])

    def result(self) -> dict[str, Any]:
        """Return the means, plain JSON except for NaN and infinity.

        ``kl`` is KL(original || new) in nats per token.

        Raises ValueError: no token was counted.
        """
        count = int(self.sums[0])
        if not count:
            raise ValueError(
                "the held-out texts have no generated tokens, so quality can't be measured; pass "
                "other texts with --heldout"
            )
        means = self.sums[1:] / count
        (before, after), kl = means[:2].exp().tolist(), float(means[2])
        return {
            "num_tokens": count,
            "perplexity_before": before,
            "perplexity_after": after,
            "kl": kl,
            "perplexity_ratio": after / before,
        }
