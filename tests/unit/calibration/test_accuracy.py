import numpy as np
import pytest
from support.observed import observed

from vllm_medusa.calibration.calibrate import measure_accuracy, shares
from vllm_medusa.calibration.observations import NO_LABEL
from vllm_medusa.calibration.walks import Walks

HEADS, RANKS = 3, 4
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]
NAMES = ("overall", "walked")


def observations(seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 40, 12)
    ranks = rng.choice([0, 1, 2, 6], (lengths.sum(), HEADS), p=[0.5, 0.2, 0.1, 0.2])
    offsets = np.cumsum([0, *lengths])
    for end in offsets[1:4]:  # texts that ended
        ranks[end - 1, 1:] = NO_LABEL
        ranks[end - 2, 2:] = NO_LABEL
    return observed(ranks, lengths, RANKS)


def by_hand(found):
    """Ranks of each head in both cases, by loops over positions and steps."""
    cases = {(name, head): [] for name in NAMES for head in range(HEADS)}
    for text in found.texts():
        rows = [tuple(map(int, row)) for row in text]
        for row in rows:
            for head in range(HEADS):
                cases["overall", head].append(row[head])
        at = 0
        while at < len(rows):
            path = ()
            while any(node[:-1] == path for node in TREE):
                cases["walked", len(path)].append(rows[at][len(path)])
                if (*path, rows[at][len(path)]) not in TREE:
                    break
                path = (*path, rows[at][len(path)])
            at += 1 + len(path)
    return cases


def test_counts_equal_those_by_hand():
    found = observations()
    measured = measure_accuracy(found, Walks(found.texts(), TREE))
    cases = by_hand(found)
    for name in NAMES:
        for head in range(HEADS):
            ranks = [rank for rank in cases[name, head] if rank != NO_LABEL]
            assert measured["counted_positions"][name][head] == len(ranks) > 0, (name, head)
            expected = [ranks.count(r) / len(ranks) for r in range(RANKS)]
            assert np.allclose(measured["accuracy"][name][head], expected, atol=1e-4)


def test_shares_exclude_unlabeled_positions():
    assert shares(np.array([0, NO_LABEL, 1, 9]), 2) == [pytest.approx(1 / 3, abs=1e-4)] * 2
    assert shares(np.array([NO_LABEL]), 2) == [None, None]
