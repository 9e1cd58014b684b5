"""Gains where every request has the same number of drafts."""

import numpy as np
import pytest

from vllm_medusa.budget.even import EvenOutlook
from vllm_medusa.budget.outlook import Outlook

TREE = [0.8, 0.4, 0.2, 0.1]


def known(kind, rows, times=400):
    outlook = kind([1.5, 1.7])
    for _ in range(times):
        outlook.observe(rows)
    return outlook


def test_it_is_the_mean_by_place():
    outlook = known(EvenOutlook, [[0.9, 0.6, 0.3, 0.3], [0.7, 0.2, 0.1, 0.0]])
    nodes = 10 * np.arange(5)
    expected = 10 * np.array([0.0, 0.8, 1.2, 1.4, 1.55])
    assert outlook.gain(10, nodes) == pytest.approx(expected, rel=0.01)
    assert outlook.gain(10, [5, 999]) == pytest.approx([4.0, 15.5], rel=0.01)


def test_requests_that_are_alike_gain_what_a_pool_does():
    even, pool = known(EvenOutlook, [TREE]), known(Outlook, [TREE])
    nodes = 3 * np.arange(5)
    assert even.gain(3, nodes) == pytest.approx(pool.gain(3, nodes), rel=0.05)


def test_unsure_requests_cost_it_more_than_a_pool():
    rows = [[0.9, 0.8, 0.7, 0.6], [0.02, 0.01, 0.01, 0.01]]
    even, pool = known(EvenOutlook, rows), known(Outlook, rows)
    assert even.gain(2, 4) < 0.7 * pool.gain(2, 4)


def test_what_was_accepted_corrects_it():
    outlook = known(EvenOutlook, [TREE])
    for _ in range(400):
        outlook.observe([TREE] * 8, [4] * 8, [0] * 8)
    assert outlook.gain(1, 4) < 0.5 * sum(TREE)


def test_it_forgets_and_idling_ages_it():
    outlook = known(EvenOutlook, [TREE])
    before = outlook.gain(4, 8)
    for _ in range(200):
        outlook.idle(4)
    assert outlook.gain(4, 8) == pytest.approx(before)
    for _ in range(60):
        outlook.observe([[0.1, 0.05, 0.0, 0.0]] * 4)
    assert outlook.gain(4, 8) < 0.6 * before
