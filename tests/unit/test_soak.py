"""What `python -m benchmarks soak` asks, and how it judges what comes back; no server runs."""

import os

import psutil

from benchmarks.soak import Seen, problem_of
from benchmarks.soak_requests import COMPLETION, Answer, Asked, requests

PROMPTS = ["one", "two", "three", "four"]


def test_the_same_seed_asks_the_same_of_all_kinds():
    asked = requests(PROMPTS, 300, 5)
    assert asked == requests(PROMPTS, 300, 5) != requests(PROMPTS, 300, 6)
    kinds = {each.kind: each for each in asked}
    assert len(kinds) == 11 and {"tools", "schema", "cancelled stream", "malformed"} <= kinds.keys()
    assert all(
        each.body["temperature"] == 0 or "seed" in each.body for each in asked if each.compared
    )


def test_an_answer_is_judged():
    compared = Asked("x", COMPLETION, {"prompt": "a"})
    refused = Asked("x", COMPLETION, {"prompt": "a"}, compared=False, refused=True)
    free = Asked("x", COMPLETION, {"prompt": "a"}, compared=False)
    good, other = Answer(texts={0: "b"}, reasons={0: "stop"}), Answer(texts={0: "c"})
    wanted = {compared.key: vars(good)}
    assert not problem_of(compared, good, wanted)
    assert "plain" in problem_of(compared, other, wanted)
    for asked in (compared, refused, free):
        assert "lost" in problem_of(asked, "TimeoutError: ", wanted)
    assert not problem_of(refused, Answer(error=(400, "BadRequestError")), wanted)
    for status in (500, None):
        assert problem_of(refused, Answer(error=status and (status, "x")), wanted)
    assert not problem_of(free, other, wanted) and problem_of(
        free, Answer(error=(500, "x")), wanted
    )


def test_growth_is_that_of_the_second_half():
    process = psutil.Process(os.getpid())
    seen = Seen(
        "me", process, [(0, 100.0), (400, 400.0), (600, 401.0), (800, 402.0), (1000, 403.0)]
    )
    assert abs(seen.slope() - 5.0) < 1e-6
    seen.look(1200)
    assert seen.points[-1][0] == 1200 and seen.points[-1][1] > 10
