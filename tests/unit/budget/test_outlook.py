"""What drafts bring: pooled over the batch, corrected by what was accepted, forgotten in time."""

import numpy as np
import pytest

from vllm_medusa.budget.even import EvenOutlook
from vllm_medusa.budget.outlook import Outlook


def drafts(rng: np.random.Generator, requests: int, nodes: int = 8) -> np.ndarray:
    """[requests, nodes] survivals, best first."""
    return -np.sort(-(rng.random((requests, nodes)) ** 3), axis=1)


def taught(steps, truth=lambda survival: survival, seed=0, verified=8):
    """Of 8 requests; a node is accepted as often as ``truth`` says."""
    rng, outlook = np.random.default_rng(seed), Outlook()
    for _ in range(steps):
        survival = drafts(rng, 8)
        accepted = (rng.random((8, verified)) < truth(survival[:, :verified])).sum(1)
        outlook.observe(survival, np.full(8, verified), accepted)
    return outlook


def test_it_begins_with_the_calibration():
    outlook = Outlook([1.5, 1.7, 1.8])
    assert outlook.gain(1, [0, 1, 2, 3, 9]) == pytest.approx([0, 0.5, 0.7, 0.8, 0.8])
    assert outlook.gain(10, [10, 30]) == pytest.approx([5.0, 8.0])


@pytest.mark.parametrize("requests", [1, 3, 64])
def test_gain_is_that_of_one_pool(requests):
    outlook = taught(300)
    nodes = np.arange(8 * requests + 1)
    gain = outlook.gain(requests, nodes)
    pools = [
        np.cumsum(-np.sort(-drafts(np.random.default_rng(99 + i), requests), axis=None))
        for i in range(200)
    ]
    expected = np.concatenate([[0.0], np.mean(pools, axis=0)])
    assert gain[0] == 0 and (np.diff(gain) >= 0).all() and (np.diff(gain, 2) < 1e-9).all()
    loose = 0.15 if requests < 8 else 0.04  # a small pool can't be cut at one survival
    assert gain == pytest.approx(expected, rel=loose, abs=0.02 * requests)


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.0])
def test_overconfidence_is_corrected(factor):
    outlook = taught(400, lambda survival: factor * survival)
    survival = drafts(np.random.default_rng(5), 8)
    found = outlook.gain_of(survival)[-1] / survival.sum()
    assert found == pytest.approx(factor, rel=0.06)


def test_underconfidence_is_corrected():
    outlook = taught(400, lambda survival: survival**0.5)
    survival = np.array([0.1, 0.2, 0.4, 0.7, 0.9])
    assert outlook.corrected(survival) == pytest.approx(
        np.minimum(survival**0.5, 2 * survival), rel=0.2
    )


def test_small_and_large_survivals_are_corrected_apart():
    """Sure heads that are too sure, unsure ones that are right; counts alone tell them apart."""
    outlook = taught(3000, lambda survival: np.where(survival > 0.5, 0.5 * survival, survival))
    ratio = outlook.ratio[0]
    assert ratio[0] < 0.65 and (ratio[1:] > 0.7).all(), ratio


def test_the_correction_has_bounds_and_keeps_the_order():
    for truth in (np.zeros_like, np.ones_like):
        outlook = taught(200, truth)
        assert ((outlook.ratio >= 0.2) & (outlook.ratio <= 2.0)).all()
        gain = outlook.gain_of(drafts(np.random.default_rng(1), 4))
        assert (np.diff(gain, 2) <= 1e-12).all() and (np.diff(gain) <= 1).all()


def test_only_what_was_verified_counts():
    outlook = taught(400, lambda survival: 0.5 * survival, verified=2)
    assert outlook.corrected(0.9) == pytest.approx(0.45, rel=0.1)
    quiet = Outlook()
    quiet.observe(drafts(np.random.default_rng(0), 4))
    quiet.observe(drafts(np.random.default_rng(0), 4), [0] * 4, [0] * 4)
    assert (quiet.ratio == 1).all()


def test_traffic_that_changes_is_followed():
    outlook = taught(300)
    before = float(outlook.gain(8, 16))
    for _ in range(400):
        outlook.observe(np.full((8, 8), 0.02))
    assert float(outlook.gain(8, 16)) == pytest.approx(0.32, rel=0.2) and before > 3


def test_what_is_long_ago_counts_less():
    outlook = taught(300)
    sure = outlook.doubt()
    before = outlook.gain(4, np.arange(9))
    for _ in range(1000):
        outlook.idle(8)
    assert sure < 0.05 and outlook.doubt() > 2 * sure
    assert outlook.gain(4, np.arange(9)) == pytest.approx(before)  # older, not other
    for _ in range(20):
        outlook.observe(np.full((8, 8), 0.02))
    after = taught(300)
    for _ in range(20):
        after.observe(np.full((8, 8), 0.02))
    assert float(outlook.gain(8, 16)) < 0.8 * float(after.gain(8, 16))


def test_nonsense_does_no_harm():
    outlook = Outlook()
    outlook.observe(np.zeros((0, 4)))
    outlook.observe(np.zeros((4, 0)), [0] * 4, [0] * 4)
    outlook.observe([[np.nan, 3.0, -1.0]], [3], [5])
    outlook.observe(np.zeros((2, 4)), [4, 4], [0, 0])
    assert np.isfinite(outlook.gain(4, np.arange(20))).all()
    assert outlook.gain_of([]).tolist() == [0.0]


def test_greedy_and_sampled_requests_are_believed_apart():
    """However long the one kind was served, the other's drafts are worth what they were."""
    rng, outlook = np.random.default_rng(3), Outlook()
    truths = (lambda survival: np.minimum(1.0, 1.5 * survival), lambda survival: 0.7 * survival)
    for turn in range(1200):
        kind = 1 if turn < 400 else 0
        survival = drafts(rng, 4) * 0.6
        accepted = (rng.random((4, 8)) < truths[kind](survival)).sum(1)
        outlook.observe(survival, np.full(4, 8), accepted, kind)
    survival = drafts(rng, 2000) * 0.6
    for kind, truth in enumerate(truths):
        expected = truth(survival).sum()
        assert outlook.gain_of(survival, kind)[-1] == pytest.approx(expected, rel=0.08)
    mixed = np.repeat([0, 1], [8, 8])
    both = outlook.gain_of(np.tile(survival[0], 2), mixed)[-1]
    alone = sum(outlook.gain_of(survival[0], kind)[-1] for kind in (0, 1))
    assert both == pytest.approx(alone)


@pytest.mark.parametrize("kind", [Outlook, EvenOutlook])
def test_a_batch_is_worth_what_its_own_kinds_are(kind):
    """Sampled requests come after many greedy ones: at once, not when those are forgotten."""
    outlook = kind()
    for _ in range(300):
        outlook.observe(np.full((4, 4), 0.8), [4] * 4, [4] * 4, 0)
    for _ in range(20):
        outlook.observe(np.full((4, 4), 0.2), [4] * 4, [0] * 4, 1)
    gains = []
    for kinds in ([0] * 4, [1] * 4, [0, 0, 1, 1]):
        outlook.expect(kinds)
        gains.append(float(outlook.gain(4, 16)))
    assert gains[0] > 12 and gains[1] < 3 and gains[1] + 2 < gains[2] < gains[0] - 2
    outlook.expect([3])  # never seen: as others, uncorrected
    assert gains[1] < float(outlook.gain(4, 16)) <= gains[0]
