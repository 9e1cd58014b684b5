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
    assert best_tree(observations(1), 8).heldout is None
