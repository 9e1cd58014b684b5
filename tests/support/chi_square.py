"""How improbable counts are under the expected probabilities."""

from __future__ import annotations

from torch import Tensor

UNLIKELY = 4.75  # standard deviations: one-sided 1e-6


def deviations(counts: Tensor, probs: Tensor) -> float:
    """The chi-square statistic as standard deviations of its (Wilson-Hilferty) normal equivalent.

    Cells with fewer than five expected counts are merged.
    """
    counts, probs = counts.double().flatten(), probs.double().flatten()
    expected = probs / probs.sum() * counts.sum()
    small = expected < 5
    cells = ((counts - expected) ** 2 / expected)[~small].tolist()
    if (rest := float(expected[small].sum())) >= 5:
        cells.append((float(counts[small].sum()) - rest) ** 2 / rest)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return float(((sum(cells) / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
