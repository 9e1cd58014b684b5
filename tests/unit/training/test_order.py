"""Every piece once an epoch, no empty step, the same order whenever it is asked."""

import itertools

import numpy as np
import pytest

from vllm_medusa.training.order import Order, split


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [16, 50, 10_000])
def test_all_steps_together_have_every_piece_once_an_epoch(epochs, batch):
    rows = np.random.default_rng(0).integers(1, 17, 200).tolist()
    order = Order(rows, list(range(200)), batch_rows=batch, epochs=epochs, seed=1)
    steps = [order.pieces(step) for step in range(order.steps)]
    seen = np.bincount(np.concatenate(steps), minlength=200)
    assert seen.tolist() == [epochs] * 200 and all(steps)
    sizes = [sum(rows[i] for i in step) for step in steps]
    assert max(sizes[:-1], default=0) < batch + 16 and sizes[-1] < 2 * batch + 16 * epochs
    assert steps != [sorted(step) for step in steps]  # shuffled
    fresh = Order(rows, list(range(200)), batch_rows=batch, epochs=epochs, seed=1)
    assert fresh.pieces(order.steps - 1) == steps[-1]  # no memory of the steps before
    other = Order(rows, list(range(200)), batch_rows=batch, epochs=epochs, seed=2)
    assert other.pieces(0) != steps[0]


def test_groups_stay_neighbours():
    groups = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4]
    order = Order([2] * 10, groups, batch_rows=2, epochs=2, seed=0)
    stream = [groups[piece] for step in range(order.steps) for piece in order.pieces(step)]
    for epoch in (stream[:10], stream[10:]):
        changes = sum(a != b for a, b in itertools.pairwise(epoch))
        assert changes == 4
    assert stream[:10] != stream[10:]  # every epoch in an order of its own


def test_split_is_even_and_complete():
    rows = [5, 1, 1, 9, 4, 4, 2, 2]
    parts = split(rows, 4)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert max(sum(rows[i] for i in part) for part in parts) <= 28 / 4 + 9
    assert split([3], 3) == [[0], [], []] and split([], 2) == [[], []]
