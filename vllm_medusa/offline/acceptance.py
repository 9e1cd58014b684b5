"""Acceptance statistics of a request, from the number of tokens per engine step.

The first step of a request is its prefill: it yields one token and verifies nothing. Every later
step verifies one tree and yields the accepted draft tokens followed by one token of the target
(recovered or bonus). Hence, over ``n`` verification steps,

    accepted = sum(delivered - 1),    tau = tokens per step = 1 + accepted / n.

A step truncated by a stop token or the token limit counts only its delivered tokens, so tau is
based on the tokens the user received. Plain decoding has ``accepted = 0`` and ``tau = 1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


class Acceptance(Counter[int]):
    """Acceptance of one request or, summed, of many: verification steps by accepted tokens."""

    @classmethod
    def of(cls, delivered: Sequence[int]) -> Acceptance:
        """From the token counts of a request's non-empty steps, prefill first."""
        if any(tokens < 1 for tokens in delivered):
            raise ValueError(f"every step must deliver a token; received {list(delivered)}")
        return cls(tokens - 1 for tokens in delivered[1:])

    @classmethod
    def summed(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """Sum of several requests."""
        found = cls()
        for part in parts:
            found.update(part)
        return found

    @property
    def histogram(self) -> list[int]:
        """Number of verification steps that accepted ``a`` draft tokens, at index ``a``."""
        return [self[a] for a in range(max(self, default=-1) + 1)]

    @property
    def steps(self) -> int:
        """Number of verification steps."""
        return self.total()

    @property
    def accepted(self) -> int:
        """Accepted and delivered draft tokens."""
        return sum(a * steps for a, steps in self.items())

    @property
    def tau(self) -> float | None:
        """Tokens per verification step; None without any."""
        return 1 + self.accepted / self.steps if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """As in a line of results, plain JSON."""
        return {
            "steps": self.steps,
            "accepted_draft_tokens": self.accepted,
            "tokens_per_step": self.tau,
            "histogram": self.histogram,
        }
