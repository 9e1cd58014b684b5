import numpy as np
from support.observed import observed

from vllm_medusa.calibration.calibrate import measure_accuracy
from vllm_medusa.calibration.observations import NO_LABEL
from vllm_medusa.calibration.walks import Walks

HEADS, RANKS = 3, 4
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]


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
    """Ranks of each head, by loops over steps."""
    cases = [[] for _ in range(HEADS)]
    for text in found.texts():
        rows = [tuple(map(int, row)) for row in text]
        at = 0
        while at < len(rows):
            path = ()
            while any(node[:-1] == path for node in TREE):
                cases[len(path)].append(rows[at][len(path)])
                if (*path, rows[at][len(path)]) not in TREE:
                    break
                path = (*path, rows[at][len(path)])
            at += 1 + len(path)
    return [[rank for rank in ranks if rank != NO_LABEL] for ranks in cases]


def test_counts_equal_those_by_hand():
    found = observations()
    measured = measure_accuracy(found, Walks(found.texts(), TREE))
    assert measured["counted_positions"] == [len(ranks) for ranks in by_hand(found)]
    for ranks, shares in zip(by_hand(found), measured["accuracy"], strict=True):
        expected = [ranks.count(r) / len(ranks) for r in range(RANKS)]
        assert np.allclose(shares, expected, atol=1e-4)


def test_heads_that_decoding_does_not_reach_have_no_shares():
    found = observations()
    measured = measure_accuracy(found, Walks(found.texts(), [(0,)]))
    assert measured["counted_positions"][1:] == [0, 0]
    assert measured["accuracy"][1:] == [[None] * RANKS] * 2
