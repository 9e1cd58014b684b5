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
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one request, or the sum over many.

    ``histogram[a]`` counts the verification steps that accepted ``a`` draft tokens.
    """

    histogram: tuple[int, ...] = ()

    @classmethod
    def of(cls, delivered: Sequence[int]) -> Acceptance:
        """From the token counts of a request's non-empty steps, prefill first."""
        if any(tokens < 1 for tokens in delivered):
            raise ValueError(f"every step must deliver a token; received {list(delivered)}")
        return cls.from_counts(Counter(tokens - 1 for tokens in delivered[1:]))

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """Sum of several requests."""
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update(dict(enumerate(part.histogram)))
        return cls.from_counts(counts)

    @classmethod
    def from_counts(cls, counts: Counter[int]) -> Acceptance:
        """From the number of steps per accepted length."""
        longest = max((a for a, n in counts.items() if n), default=-1)
        return cls(tuple(counts[a] for a in range(longest + 1)))

    @property
    def steps(self) -> int:
        """Number of verification steps."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Accepted and delivered draft tokens."""
        return sum(a * n for a, n in enumerate(self.histogram))

    @property
    def tau(self) -> float | None:
        """Tokens per verification step; None without any."""
        return 1 + self.accepted / self.steps if self.steps else None
