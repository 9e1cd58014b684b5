"""Where a request's last tokens stood before, and what followed them there.

    tokens        a b c d e a b c        the last three stood at 0 already
    length, start 3, 3                   so d e may follow, and then a b c d e ... again

Of all places the one counts that agrees over most tokens, of equally good ones the latest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]

LONGEST = 32  # tokens that are compared
SHORTEST = 2  # tokens that have to agree
_PLACES = 2048  # the latest so many are looked at


def longest_match(tokens: Ints) -> tuple[int, int]:
    """How many of the last of ``tokens`` [n] stood before, and where it went on; (0, 0): nowhere.

    One pass over the text for each of the `SHORTEST` last tokens, then only its few places.
    """
    last = len(tokens) - 1
    if last < SHORTEST:
        return 0, 0
    first = SHORTEST - 1  # the first place that has so many tokens
    same = tokens[first:last] == tokens[last]
    for back in range(1, SHORTEST):
        same &= tokens[first - back : last - back] == tokens[last - back]
    places = np.flatnonzero(same)[-_PLACES:] + first
    if not len(places):
        return 0, 0
    steps = np.arange(min(LONGEST, last))
    ending = tokens[last - steps]
    latest = int(places[-1])
    if latest + 1 >= LONGEST and (tokens[latest - steps] == ending).all():
        return LONGEST, latest + 1  # as it is in loops, with many places
    before = places[:, None] - steps  # [places, LONGEST]
    same = (tokens[before.clip(0)] == ending) & (before >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(1)
    best = int(lengths.max())
    return best, int(places[lengths == best][-1]) + 1


def continuation(tokens: Ints, start: int, count: int, vocab_size: int) -> Ints:
    """``count`` tokens from ``start`` on; behind the end of the text it goes on in a circle.

    It ends before the first that is no token of the vocabulary (what stands for an image may be
    none).
    """
    found = tokens[start + np.arange(count) % (len(tokens) - start)]
    strange = np.flatnonzero((found < 0) | (found >= vocab_size))
    return found[: strange[0]] if len(strange) else found
