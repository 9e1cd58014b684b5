import numpy as np
import pytest

from vllm_medusa.calibration.confidence import calibration_error, fit_temperature
from vllm_medusa.calibration.observe import SHARPNESS


def test_ece_by_hand():
    confidence, right = np.array([0.95, 0.95, 0.95, 0.95, 0.15]), np.array([1, 1, 1, 0, 1])
    assert calibration_error(confidence, right, 10) == pytest.approx((4 * 0.2 + 1 * 0.85) / 5)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0, "a confidence of 1 has a bin"
    assert np.isnan(calibration_error(np.array([]), np.array([])))


@pytest.mark.parametrize(("wrong_by", "expected"), [(1.0, 1.0), (2.3, 2.3), (0.6, 0.6), (50, 4.0)])
def test_the_planted_temperature_is_found(wrong_by, expected):
    """Labels sampled from softmax(z), and a head with logits z * wrong_by."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(20_000, 12)) * 2
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(1)
    logits = truth * wrong_by
    rows = np.arange(len(labels))
    powers = logits[:, :, None] * np.array(SHARPNESS)
    top = powers.max(1)
    partition = np.log(np.exp(powers - top[:, None]).sum(1)) + top  # [m, G]
    first = labels == logits.argmax(1)
    labeled = np.ones(len(labels), bool)
    labeled[:100] = False
    own = np.where(labeled, logits[rows, labels], np.nan)
    fit = fit_temperature(own, logits.max(1), partition, first, labeled)
    assert fit.temperature == pytest.approx(expected, rel=0.03)
    if wrong_by != 50:
        assert fit.fitted_ece < 0.02
    if wrong_by not in (1.0, 50):
        assert fit.ece > 0.1 and fit.fitted_nll < fit.nll - 0.05
    logged = np.log(np.exp(logits[labeled]).sum(1)) if wrong_by < 5 else None
    if logged is not None:
        assert fit.nll == pytest.approx((logged - own[labeled]).mean(), rel=1e-6)


def test_without_labels_nothing_is_fitted():
    nothing = np.full(3, np.nan)
    grid = np.zeros((3, len(SHARPNESS)))
    assert fit_temperature(nothing, nothing, grid, nothing > 0, nothing > 0) is None
