import math

import numpy as np
import pytest
from support.observed import observed

from vllm_medusa.calibration.choose import best_tree
from vllm_medusa.calibration.walks import Walks, walked_tree


def observations(num_prompts=6):
    rng = np.random.default_rng(0)
    lengths = np.full(num_prompts, 60)
    ranks = rng.geometric(0.45, (lengths.sum(), 3)) - 1
    return observed(ranks, lengths)


def test_the_value_of_every_size_equals_its_walks():
    found = observations()
    chosen = best_tree(found, 8)
    texts, width = found.texts(), found.num_ranks
    assert chosen.paths == walked_tree(texts, 8, width)
    halves = [found.texts(half) for half in found.halves()]
    for size in range(1, 9):
        assert chosen.walked[size - 1] == Walks(texts, chosen.paths[:size]).tau()
        crossed = [
            Walks(other, walked_tree(own, 8, width)[:size]).tau()
            for own, other in (halves, halves[::-1])
        ]
        assert chosen.heldout[size - 1] == pytest.approx(np.mean(crossed))


def test_a_single_prompt_is_not_split():
    chosen = best_tree(observations(1), 8)
    assert chosen.heldout is None and math.isnan(chosen.standard_error)


def test_the_error_is_computed_over_prompts():
    right, wrong = [0], [5]
    even = [right, right, wrong, wrong] * 2  # of each prompt 1 accepted in 3 steps
    assert best_tree(observed(even, [4, 4], 2), 1).standard_error == 0
    uneven = [right] * 4 + [wrong] * 4  # 2 accepted in 2 steps; 0 in 4
    chosen = best_tree(observed(uneven, [4, 4], 2), 1)
    assert chosen.walked == [pytest.approx(1 + 2 / 6)]
    spread = (2 - 2 / 3) ** 2 + (0 - 4 / 3) ** 2
    assert chosen.standard_error == pytest.approx(math.sqrt(2 * spread) / 6)
