import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.offline.batch import Acceptance

steps = st.lists(st.integers(1, 6), min_size=1)


def test_the_prefill_step_is_not_a_verification():
    acceptance = Acceptance.of([1, 3, 1, 2, 3])
    assert acceptance.histogram == [1, 1, 2]
    assert (acceptance.steps, acceptance.accepted) == (4, 5)
    assert acceptance.tau == 1 + 5 / 4


def test_one_token_has_no_verification_step():
    assert Acceptance.of([1]).tau is None
    assert Acceptance.of([]).steps == 0
    with pytest.raises(ValueError, match="every step must deliver"):
        Acceptance.of([1, 0])


@given(steps)
def test_every_token_is_counted_once(delivered):
    acceptance = Acceptance.of(delivered)
    assert delivered[0] + acceptance.steps + acceptance.accepted == sum(delivered)


@given(st.lists(steps))
def test_the_total_is_the_sum(all_delivered):
    parts = [Acceptance.of(d) for d in all_delivered]
    total = Acceptance.summed(parts)
    assert total.steps == sum(p.steps for p in parts)
    assert total.accepted == sum(p.accepted for p in parts)
    assert Acceptance.summed([total]) == total
