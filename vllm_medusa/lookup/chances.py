"""How often the next token of a continuation is right, by how many tokens agree so far.

It is learned while serving, from every continuation whose request went on, verified or not: what
the request says next is known either way. So what is believed doesn't depend on what was believed.
Greedy requests copy more faithfully than sampled ones and are counted apart. What was seen long
ago is forgotten.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_medusa.lookup.search import LONGEST

Floats = npt.NDArray[np.floating]

_ENDS = np.array([1, 2, 3, 5, 8, 12, 18, 26, LONGEST])  # the longest match of each bucket
BUCKET = np.searchsorted(_ENDS, np.arange(LONGEST + 1))
PRIOR = np.array(
    [
        [0.2, 0.35, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93],  # greedy
        [0.1, 0.2, 0.3, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8],  # sampled
    ]
)
TRUST = 8.0  # tokens that the prior is worth
WINDOW = 256.0  # tokens by which a bucket is known
MOST = 0.995


class Chances:
    """Survivals of continuations."""

    def __init__(self) -> None:
        self._right, self._tried = np.zeros_like(PRIOR), np.zeros_like(PRIOR)
        self._chance: Floats = PRIOR[:, BUCKET]  # [2, 1 + LONGEST], by tokens that agree

    def survival(self, matched: int, count: int, *, sampled: bool) -> Floats:
        """Chance that the first 1, 2, .. ``count`` tokens behind such a match are right."""
        agree = np.minimum(matched + np.arange(count), LONGEST)
        return self._chance[int(sampled)][agree].cumprod()

    def learn(self, matched: int, right: int, *, ended: bool, sampled: bool) -> None:
        """Say what became of a continuation.

        Args:
            matched: tokens that agreed where it began.
            right: tokens of it that the request then said.
            ended: whether it went on otherwise; else nothing is known of further tokens.
            sampled: whether the request samples.

        """
        row, tried = int(sampled), right + ended
        buckets = BUCKET[np.minimum(matched + np.arange(tried), LONGEST)]
        tries = np.bincount(buckets, minlength=len(_ENDS))
        rights = np.bincount(buckets[:right], minlength=len(_ENDS))
        kept = np.exp(-tries / WINDOW)
        self._tried[row] = kept * self._tried[row] + tries
        self._right[row] = kept * self._right[row] + rights
        prior = PRIOR[row]
        chance = (self._right[row] + TRUST * prior) / (self._tried[row] + TRUST)
        self._chance[row] = np.minimum(chance, MOST)[BUCKET]
