"""The pool across a batch: the best drafts of all requests, as prefixes of each one's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.worker.scheduler import Step, _Seen, share

survivals = st.lists(st.lists(st.sampled_from([1.0, 0.5, 0.5, 0.2, 0.1]), max_size=6), max_size=5)


@given(survivals, st.integers(0, 20))
def test_the_best_drafts_are_kept(lists, total):
    lists = [sorted(values, reverse=True) for values in lists]
    counts = share(lists, total)
    kept = [value for values, n in zip(lists, counts, strict=True) for value in values[:n]]
    left = [value for values, n in zip(lists, counts, strict=True) for value in values[n:]]
    assert sum(counts) == min(total, sum(map(len, lists)))
    assert not kept or not left or min(kept) >= max(left)


@pytest.mark.parametrize(
    ("total", "expected"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (3, [2, 0, 1]), (9, [2, 1, 2])]
)
def test_ties_go_to_the_first(total, expected):
    assert share([[0.9, 0.5], [0.3], [0.5, 0.1]], total) == expected


def test_the_log_averages_over_seconds_of_decoding():
    """However long nothing was to do between two steps: a server may idle for hours."""
    seen = _Seen()
    for start in (0.0, 5000.0):
        assert not seen.enough
        seen.add(Step(start, 8, 1, True, False, {"a": 7}), 5.0, 4.0)
    assert not seen.enough
    for _ in range(2000):
        seen.add(Step(5001.0, 8, 1, True, False, {"a": 7}), 5.0, 4.0)
    assert seen.enough and "7.0 draft nodes a step for 1.0 requests" in str(seen)
