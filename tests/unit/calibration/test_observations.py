"""Observations of heads at positions of a text, and their file."""

import numpy as np
import pytest
import torch
from support.data import observed

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration import observe as module
from vllm_medusa.calibration.observations import FILE, MISSED, NO_LABEL, Observations
from vllm_medusa.calibration.observe import SHARPNESS, fit_temperature, observe
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.proposer.topk import stable_topk

VOCAB, HIDDEN, HEADS, COUNT = 23, 8, 3, 40


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


def make(token_map=None):
    torch.manual_seed(0)
    heads = MedusaHeads(HEADS, 1, HIDDEN, VOCAB, num_lm_heads=0, token_map=token_map)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    lm_head = torch.nn.Linear(HIDDEN, VOCAB)

    def scorer(x):  # few distinct values: ties everywhere
        return (lm_head(x) * 2).round()

    states = torch.randn(COUNT, HIDDEN)
    labels = torch.randint(0, VOCAB, (COUNT, HEADS))
    labels[3, 1:] = NO_LABEL
    return heads, scorer, states, labels


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("elements", [1 << 24, 200], ids=["at once", "in chunks"])
def test_ranks_are_positions_in_the_proposers_order(monkeypatch, mapped, elements):
    monkeypatch.setattr(module, "_CPU_ELEMENTS", elements)
    token_map = torch.randperm(VOCAB)[:15] if mapped else None
    heads, scorer, states, labels = make(token_map)
    closely = torch.arange(COUNT) % 3 == 1
    with torch.no_grad():
        logits = heads.compute_logits(heads(states), scorer)  # [n, K, V]
        seen = observe(heads, states, labels, scorer, closely)
    order = stable_topk(logits, logits.shape[2])
    order = order if token_map is None else token_map[order]
    tied = 0
    for row in range(COUNT):
        for head in range(HEADS):
            label = int(labels[row, head])
            places = order[row, head].tolist()
            if label == NO_LABEL:
                expected = NO_LABEL
            else:
                expected = places.index(label) if label in places else MISSED
            assert seen.ranks[row, head] == expected
            tied += len(set(logits[row, head].tolist())) < logits.shape[2]
    assert tied > 100, "the order only matters for ties"
    rows = torch.nonzero(closely)[:, 0]
    assert len(seen.own) == len(rows)
    for place, row in enumerate(rows.tolist()):
        for step in (0, 16, 32):
            expected = (logits[row] * SHARPNESS[step]).logsumexp(-1)
            assert np.allclose(seen.partition[place, :, step], expected, atol=1e-4)
    assert SHARPNESS[16] == 1


@pytest.mark.parametrize(("wrong_by", "expected"), [(1.0, 1.0), (2.3, 2.3), (0.6, 0.6), (50, 4.0)])
def test_the_planted_temperature_is_found(wrong_by, expected):
    """Labels sampled from softmax(z), and a head with logits z * wrong_by."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(20_000, 12)) * 2
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(1)
    logits = truth * wrong_by
    powers = logits[:, :, None] * np.array(SHARPNESS)
    top = powers.max(1)
    partition = np.log(np.exp(powers - top[:, None]).sum(1)) + top  # [m, G]
    own = logits[np.arange(len(labels)), labels]
    own[:100] = np.nan  # no label
    assert fit_temperature(own, partition) == pytest.approx(expected, rel=0.03)


def test_without_labels_nothing_is_fitted():
    assert fit_temperature(np.full(3, np.nan), np.zeros((3, len(SHARPNESS)))) is None
