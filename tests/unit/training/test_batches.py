"""Which texts a step trains, and in which passes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.training.batches import plan_steps, split_passes

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 100), st.integers(0, 1 << 40))
def test_every_epoch_has_every_text_once(lengths, epochs, step_tokens, seed):
    steps = plan_steps(lengths, epochs=epochs, step_tokens=step_tokens, seed=seed)
    assert Counter(t for step in steps for t in step) == dict.fromkeys(range(len(lengths)), epochs)
    for step in steps:
        assert len(step) == 1 or sum(lengths[t] for t in step) <= step_tokens
    first = [t for step in steps for t in step][: len(lengths)]
    assert sorted(first) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 100))
def test_passes_are_the_step_and_fit(lengths, pass_tokens):
    texts = list(range(0, len(lengths), 2))
    passes = split_passes(texts, lengths, pass_tokens)
    assert sorted(t for part in passes for t in part) == texts
    for part in passes:
        assert len(part) == 1 or len(part) * max(lengths[t] for t in part) <= pass_tokens


def test_orders_differ_by_epoch_and_seed_alone():
    lengths = [10] * 30
    one = plan_steps(lengths, epochs=2, step_tokens=100, seed=1)
    assert one == plan_steps(lengths, epochs=2, step_tokens=100, seed=1)
    assert one[:3] != one[3:] and one != plan_steps(lengths, epochs=2, step_tokens=100, seed=2)
    assert one[:3] == plan_steps(lengths, epochs=1, step_tokens=100, seed=1)


@pytest.mark.parametrize("steps", [1, 3, 4, 100])
def test_at_most_so_many_steps(steps):
    whole = plan_steps([10] * 30, epochs=2, step_tokens=100, seed=1)
    assert plan_steps([10] * 30, epochs=2, step_tokens=100, seed=1, steps=steps) == whole[:steps]
