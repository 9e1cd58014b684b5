"""The figures of `python -m benchmarks typical`, on texts and distributions done by hand."""

from collections import Counter

import pytest
import torch

from benchmarks.typical import distinct, kinds, likeliest, on_line, variation


def test_pairs_have_the_probabilities_of_the_chain():
    first = torch.tensor([0.5, 0.3, 0.2]).log()
    second = torch.tensor([[0.1, 0.9, 0.0], [0.25, 0.25, 0.5]]).log()  # after tokens 1 and 0
    found = likeliest(first, torch.tensor([1, 0]), second, 1.0, 3)
    assert list(found) == [(1, 1), (0, 2), (0, 0)] or list(found) == [(1, 1), (0, 2), (0, 1)]
    assert list(found.values()) == pytest.approx([0.27, 0.25, 0.125])
    cold = likeliest(first, torch.tensor([1, 0]), second, 0.5, 1)
    assert cold == pytest.approx({(0, 2): (0.25 / 0.38) * (0.25 / 0.375)})


def test_the_distance_counts_all_others_as_one():
    wanted = {(0, 0): 0.5, (0, 1): 0.3}
    assert variation(Counter({(0, 0): 5, (0, 1): 3, (7, 7): 1, (8, 8): 1}), wanted) < 1e-9
    assert variation(Counter({(0, 0): 10}), wanted) == pytest.approx(0.5)
    assert variation(Counter({(9, 9): 4}), wanted) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("text", "n", "share"), [([1, 2, 1, 2, 1], 2, 0.5), ([1, 2, 3], 2, 1.0), ([1], 4, 1.0)]
)
def test_distinct(text, n, share):
    assert distinct(text, n) == share


def test_both_deltas_of_each_epsilon_once():
    found = [(kind.epsilon, kind.delta) for kind in kinds((0.01, 0.09)) if kind.epsilon]
    assert found == [(0.01, 0.3), (0.01, 0.1), (0.09, 0.3)]
    rows = [{"epsilon": epsilon, "delta": delta} for epsilon, delta in found]
    assert [on_line(row, rooted=True) for row in rows] == [False, True, True]
    assert [on_line(row, rooted=False) for row in rows] == [True, False, True]
