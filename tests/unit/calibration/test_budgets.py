import json

import numpy as np
import pytest
from support.observed import observed

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.accuracy import accuracy_table
from vllm_medusa.calibration.budgets import Limits, StepCost, build_tree, curve, usual_sizes
from vllm_medusa.calibration.independence import independent_tau
from vllm_medusa.calibration.walks import Walks

LIMITS = Limits(num_draft_tokens=8, max_rank=3)


def observations(num_prompts=6):
    rng = np.random.default_rng(0)
    lengths = np.full(num_prompts, 60)
    ranks = rng.geometric(0.45, (lengths.sum(), 3)) - 1
    return observed(ranks, lengths)


@pytest.mark.parametrize("algorithm", ["walk", "independence"])
def test_a_curve_is_what_its_trees_are_worth(algorithm):
    found = observations()
    result = curve(found, algorithm, LIMITS, range(1, 9))
    texts = found.texts()
    assert result.paths == build_tree(algorithm, texts, LIMITS)
    halves = [found.texts(half) for half in found.halves()]
    for at, size in enumerate(result.sizes):
        tree = result.paths[:size]
        assert result.walked[at] == Walks(texts, tree).tau()
        table = accuracy_table(found.ranks, 3).astype(float)
        assert result.independent[at] == pytest.approx(independent_tau(table, tree))
        crossed = [
            Walks(other, build_tree(algorithm, own, LIMITS)[:size]).tau()
            for own, other in (halves, halves[::-1])
        ]
        assert result.heldout[at] == pytest.approx(np.mean(crossed))
    assert result.expected() == result.heldout


def test_on_the_texts_it_was_built_from_the_walk_is_better():
    walk, independent = (
        curve(observations(), name, LIMITS, [8]) for name in ("walk", "independence")
    )
    assert walk.walked[0] >= independent.walked[0]


def test_of_one_prompt_nothing_is_held_out():
    result = curve(observations(1), "walk", LIMITS, [2, 99])
    assert result.heldout == [None, None]
    assert result.expected() == result.walked
    assert result.sizes == [2, 8]


def test_usual_sizes_end_with_the_budget():
    assert usual_sizes(1) == [1]
    assert usual_sizes(10) == [1, 2, 4, 8, 10]
    assert usual_sizes(63)[-3:] == [32, 48, 63]
    assert usual_sizes(100)[-3:] == [63, 96, 100]


def test_the_size_that_pays_most(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"4": 12, "0": 10, "8": 30}))
    cost = StepCost.load(path)
    assert cost.at(2) == pytest.approx(11) and cost.at(6) == pytest.approx(21)
    assert cost.best([2, 4, 8, 9], [1.3, 1.8, 2.0, 99.0]) == (4, pytest.approx(1.5))
    assert cost.best([2, 4], [1.0, 1.1]) == (0, 1.0), "plain decoding is faster"


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"4": 1}', '{"0": 1}', '{"0": 0, "4": 1}', '{"a": 1}']
)
def test_costs_that_are_none_are_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="draft nodes"):
        StepCost.load(path)
