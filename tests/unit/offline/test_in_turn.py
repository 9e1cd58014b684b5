from dataclasses import replace

import pytest
from support.fake_engine import FakeProcess

from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.prompts import Prompt

PROMPTS = [Prompt(i, i + 1, f"r{i}", text=f"prompt {i}") for i in range(10)]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_equal_tokens_are_identical_for_any_steps(concurrency):
    calls = []
    _, comparison = run_in_turn(
        [FakeProcess(), FakeProcess(step_sizes=(3, 1))],
        PROMPTS,
        concurrency=concurrency,
        seed=3,
        rounds=2,
        progress=lambda *done: calls.append(done),
    )
    assert comparison.identical
    assert comparison.requests == 20
    assert comparison.baseline.tokens == comparison.candidate.tokens
    assert comparison.baseline.acceptance.tau == 1
    assert comparison.candidate.acceptance.tau > 1
    total = 2 * -(-10 // concurrency)
    assert calls == [(done, total) for done in range(1, total + 1)]
    assert sorted(comparison.candidate.results) == list(range(10))


def differences(candidate, **baseline):
    """The differences from a plain engine."""
    plain = FakeProcess(**baseline)
    _, comparison = run_in_turn([plain, candidate], PROMPTS, concurrency=4, seed=3, rounds=1)
    assert not comparison.identical
    return comparison.differences


def test_a_wrong_token_is_found_and_reported():
    difference = differences(FakeProcess(wrong_at=2))[0]
    assert (difference.position, difference.reason) == (2, "token")
    assert difference.candidate == difference.baseline + 1000


def test_a_shorter_answer_differs():
    found = differences(FakeProcess(max_tokens=2), max_tokens=50)
    assert any(d.candidate is None and d.baseline is not None for d in found)


def test_another_finish_reason_differs():
    class Stopping(FakeProcess):
        def step(self):
            return [replace(d, finish_reason=d.finish_reason and "stop") for d in super().step()]

    found = differences(Stopping())
    assert [difference.reason for difference in found] == ["finish reason"] * 10


@pytest.mark.parametrize(
    ("turn", "orders"), [(None, ("abbaabba", "baabbaab")), (2, ("aabbbbaa", "bbaaaabb"))]
)
def test_the_first_engine_alternates(turn, orders):
    begun = ""

    class Noting(FakeProcess):
        name = "a"

        def submit(self, *arguments):
            nonlocal begun
            begun += self.name
            super().submit(*arguments)

    class Other(Noting):
        name = "b"

    run_in_turn([Noting(), Other()], PROMPTS[:4], concurrency=1, seed=3, turn=turn)
    assert begun in orders


def test_no_round_starts_that_would_end_too_late(monkeypatch):
    now = 0.0
    monkeypatch.setattr("vllm_medusa.offline.in_turn.time.perf_counter", lambda: now)

    class Slow(FakeProcess):
        def submit(self, *args):
            nonlocal now
            now += 1.0
            super().submit(*args)

    def rounds(seconds):
        _, found = run_in_turn(
            [Slow(), Slow()], PROMPTS[:1], concurrency=1, seed=3, rounds=50, seconds=seconds
        )
        return len(found.candidate.rates)

    assert [rounds(seconds) for seconds in (0.0, 3.9, 4.0, 11.9, 1000.0)] == [1, 1, 2, 5, 50]


def test_an_empty_comparison_is_not_identical():
    with pytest.raises(ValueError, match="no prompts"):
        run_in_turn([FakeProcess(), FakeProcess()], [], concurrency=1, seed=0)
    engines = [FakeProcess(longest_prompt=1), FakeProcess()]
    with pytest.raises(ValueError, match="r0 was refused"):
        run_in_turn(engines, PROMPTS, concurrency=1, seed=0)


def test_every_engine_is_compared_with_the_first():
    others = [FakeProcess(step_sizes=(3, 1)), FakeProcess(wrong_at=2)]
    found = run_in_turn([FakeProcess(), *others], PROMPTS, concurrency=4, seed=3, rounds=2)
    assert [each.identical for each in found] == [True, True, False]
    assert found[0].ratio == 1 and len(found[2].ratios) == 2
