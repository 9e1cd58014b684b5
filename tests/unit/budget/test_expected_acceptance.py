"""Expected acceptance: pooled over the batch, corrected by observations, with decay."""

import numpy as np
import pytest

from vllm_medusa.budget.expected_acceptance import Drafted, ExpectedAcceptance


def drafts(rng: np.random.Generator, requests: int) -> np.ndarray:
    """[requests, 8] survivals, best first."""
    return -np.sort(-(rng.random((requests, 8)) ** 3), axis=1)


def trained(steps: int, factor: float = 1.0, verified: int = 8) -> ExpectedAcceptance:
    """For 8 requests; a node is accepted ``factor`` times as often as its survival."""
    rng, acceptance = np.random.default_rng(0), ExpectedAcceptance()
    for _ in range(steps):
        survival = drafts(rng, 8)
        chances = (factor * survival[:, :verified]).clip(0, 1)
        accepted = (rng.random((8, verified)) < chances).sum(1)
        acceptance.observe([Drafted(row) for row in survival], [verified] * 8, accepted)
    return acceptance


def test_it_starts_from_the_calibration():
    acceptance = ExpectedAcceptance([1.5, 1.7, 1.8])
    gain = acceptance.gain(np.array([0, 1, 2, 3, 9]), None)
    assert gain == pytest.approx([0, 0.5, 0.7, 0.8, 0.8])
    assert acceptance.even_gain(2) == pytest.approx(0.7)


@pytest.mark.parametrize("requests", [3, 64])
def test_the_gain_is_computed_over_one_pool(requests):
    nodes = np.arange(8 * requests + 1)
    gain = requests * trained(300).gain(nodes / requests, None)
    pools = [
        np.cumsum(-np.sort(-drafts(np.random.default_rng(99 + i), requests), axis=None))
        for i in range(200)
    ]
    expected = np.concatenate([[0.0], np.mean(pools, axis=0)])
    assert gain == pytest.approx(expected, rel=0.15 if requests < 8 else 0.04, abs=0.03 * requests)


def test_equal_shares_gain_less_than_the_pool():
    acceptance = trained(300)
    expected = drafts(np.random.default_rng(1), 4000)[:, :2].sum(1).mean()
    assert acceptance.even_gain(2) == pytest.approx(expected, rel=0.05)
    assert acceptance.even_gain(2) < float(acceptance.gain(np.array([2.0]), None)[0])


@pytest.mark.parametrize("factor", [0.4, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("verified", [2, 8])
def test_confidence_is_corrected_by_verified_drafts(factor, verified):
    acceptance = trained(400, factor, verified=verified)
    survival = [0.1, 0.3, 0.6]
    of_two_kinds = [Drafted(survival, copied=[0, 0, 1]), Drafted(survival, kind=1)]
    found = [value for draft in of_two_kinds for value in acceptance.corrected(draft)]
    assert found[:2] == pytest.approx(factor * np.array(survival[:2]), rel=0.12)
    assert found[2] == 0.6  # copied: already measured
    assert found[3:] == pytest.approx(survival)  # another kind of requests


def test_older_observations_have_less_weight():
    gains = []
    for idle in (0, 8000):
        acceptance = trained(300)
        before = acceptance.gain(np.arange(9.0), None)
        acceptance.forget(idle)
        assert acceptance.gain(np.arange(9.0), None) == pytest.approx(before)  # only older
        for _ in range(20):
            acceptance.observe([Drafted([0.02] * 8)] * 8, [0] * 8, [0] * 8)
        gains.append(float(acceptance.gain(np.array([2.0]), None)[0]))
    assert gains[1] < 0.8 * gains[0]


def test_nothing_is_learned_beyond_a_limit():
    acceptance = trained(300)
    whole, four = float(acceptance.gain(np.array([8.0]), None)[0]), acceptance.even_gain(4)
    for _ in range(300):
        acceptance.observe([Drafted([0.9] * 2, limit=2)] * 8, [0] * 8, [0] * 8)
    assert acceptance.even_gain(2) == pytest.approx(1.8, rel=0.05)
    assert float(acceptance.gain(np.array([8.0]), None)[0]) > whole
    assert acceptance.even_gain(4) > four


def test_the_gain_of_a_limit_is_that_of_its_ranks():
    acceptance = ExpectedAcceptance()
    for _ in range(5000):  # the prior is forgotten
        acceptance.observe([Drafted([0.9, 0.8, 0.5, 0.4, 0.3])], [0], [0])
    for limit, gain in ((1, 0.9), (2, 1.7), (3, 2.2), (4, 2.6), (5, 2.6), (6, 2.9), (None, 2.9)):
        assert acceptance.gain(np.array([6.0]), limit)[0] == pytest.approx(gain, rel=0.01)
        assert acceptance.gain(np.array([1.0]), limit)[0] == pytest.approx(0.9, rel=0.01)


def test_copies_do_not_count_toward_the_limit():
    acceptance = ExpectedAcceptance([1.5])
    assert not acceptance.copies
    for _ in range(300):
        both = [Drafted([0.9, 0.8, 0.4], 0, 1, [2, 2, 0]), Drafted([0.4], 0, 1, [0])]
        acceptance.observe(both, [0, 0], [0, 0])
    assert acceptance.copies
    nodes = np.array([1.0, 9.0])
    assert acceptance.gain(nodes, 0) == pytest.approx([0.85, 0.85], rel=0.02)
    assert acceptance.gain(nodes, 1)[1] == pytest.approx(1.25, rel=0.02)
    acceptance.no_copies(10_000)
    assert not acceptance.copies


def test_invalid_values_are_harmless():
    acceptance = ExpectedAcceptance()
    acceptance.observe([], [], [])
    acceptance.observe([Drafted([]), Drafted([])], [0, 0], [0, 0])
    acceptance.observe([Drafted([float("nan"), 3.0, -1.0])], [3], [5])
    acceptance.observe([Drafted([0.0] * 4)] * 2, [4, 4], [0, 0])
    assert np.isfinite(acceptance.gain(np.arange(20.0), None)).all()
