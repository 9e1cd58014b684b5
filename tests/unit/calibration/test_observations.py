import numpy as np
import pytest
from support.observed import observed

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.observations import FILE, Observations


def sample(lengths=(3, 5), temperatures=(0.8, np.nan)):
    ranks = np.arange(sum(lengths) * 2).reshape(-1, 2)
    temperatures = np.array(temperatures, np.float32)
    return observed(ranks, lengths, temperatures=temperatures, source={"heads": "abc"})


def test_saved_observations_are_loaded(tmp_path):
    sample().save(tmp_path)
    back = Observations.load(tmp_path)
    for name in ("ranks", "offsets", "temperatures", "prompts"):
        assert np.array_equal(getattr(back, name), getattr(sample(), name), equal_nan=True)
        assert getattr(back, name).dtype == getattr(sample(), name).dtype
    assert back.source == {"heads": "abc"} and back.num_ranks == sample().num_ranks
    assert [len(text) for text in back.texts()] == [3, 5]
    assert back.texts([1])[0][0].tolist() == [6, 7]
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    (tmp_path / "any").touch()
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "any").stat().st_mode


def test_the_temperature_of_most_positions_is_used():
    for lengths, temperatures, expected in (
        ((3, 5), (0.8, np.nan), None),
        ((5, 3), (0.8, np.nan), 0.8),
        ((5, 3, 3), (0.0, 0.7, 0.7), 0.7),
        ((4,), (0.0,), 0.0),
    ):
        assert sample(lengths, temperatures).temperature() == expected


def test_absent_and_damaged_files_are_reported(tmp_path):
    with pytest.raises(CalibrationError, match="vllm-medusa calibrate TARGET"):
        Observations.load(tmp_path)
    sample().save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[:-5])
    with pytest.raises(CalibrationError, match="calibrate again"):
        Observations.load(tmp_path)
