"""Acceptance statistics of a request, from the number of tokens per engine step.

The first step of a request is its prefill: it delivers one token and verifies nothing. Every later
step verifies one tree and delivers the accepted draft tokens and then one token of the target's
own (recovered or bonus). Hence, over ``n`` verification steps,

    accepted = sum(delivered - 1),    tau = tokens per step = 1 + accepted / n.

A step cut short by a stop token or the token limit counts what it delivered, so tau is the number
of tokens the user got and never more. Plain decoding is the case ``accepted = 0``, ``tau = 1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


class Acceptance(Counter[int]):
    """Acceptance of one request or, summed, of many: verification steps by accepted tokens."""

    @classmethod
    def of(cls, delivered: Sequence[int]) -> Acceptance:
        """From the token counts of a request's steps that delivered any, prefill first."""
        if any(tokens < 1 for tokens in delivered):
            raise ValueError(f"every step delivers a token; got {list(delivered)}")
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
        """At ``a`` the number of verification steps that accepted ``a`` draft tokens."""
        return [self[a] for a in range(max(self, default=-1) + 1)]

    @property
    def steps(self) -> int:
        """Number of verification steps."""
        return self.total()

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted and delivered."""
        return sum(a * steps for a, steps in self.items())

    @property
    def tau(self) -> float | None:
        """Tokens per verification step; None when there was none."""
        return 1 + self.accepted / self.steps if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """As in a line of results, plain JSON."""
        return {
            "steps": self.steps,
            "accepted_draft_tokens": self.accepted,
            "tokens_per_step": self.tau,
            "histogram": self.histogram,
        }
