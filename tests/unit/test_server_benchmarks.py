"""The benchmarks `serve` and `soak`: arrivals, requests, and verification of answers."""

from pathlib import Path

import numpy as np
import pytest
from support.assets import ASSETS, HEADS, TARGET

from benchmarks import serve
from benchmarks.serve import AGAIN, Load, ServeOptions
from benchmarks.soak import problem_of
from benchmarks.soak_requests import COMPLETION, Answer, Request, requests
from vllm_medusa.job import SILENT, JobFailed

PROMPTS = ["one", "two", "three", "four"]


@pytest.fixture
def options():
    assets = {"target": Path(TARGET), "drafter": Path(HEADS), "texts": (ASSETS / "prompts.jsonl",)}
    return ServeOptions(**assets, rates=(1.0, 4.0), ramp=0.0, rounds=2, nodes=(4,))


def test_arrivals_are_poisson_and_equal_for_all_servers():
    load = Load("4/s", 4.0, 1000.0)
    found = np.array(load.arrivals(0))
    assert found.tolist() == load.arrivals(0) != load.arrivals(1)
    gaps = np.diff(found)
    assert gaps.min() >= 0 and found[-1] < 1000
    assert len(found) == pytest.approx(4000, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.1)
    assert len(Load("idle", 1e-6, 10.0).arrivals(0)) == 1


def answers(texts, ms):
    return {
        "latencies": [ms] * len(texts),
        "ttfts": [0.5 * ms] * len(texts),
        "output_lens": [3] * len(texts),
        "itls": [[0.25 * ms]] * len(texts),
        "generated_texts": texts,
        "errors": [""] * len(texts),
        "duration": 2.0,
    }


def test_servers_alternate_and_other_answers_have_no_figures(options, monkeypatch):
    planned = []

    class Server:
        def __init__(self, arm, options):
            self.name = arm.name

        def __enter__(self):
            if self.name == "heads, dynamic 4":
                raise JobFailed("no room")
            return self.name

        def __exit__(self, *_):
            pass

    def ask(url, requests, seconds):
        planned.append((url, requests))
        wrong = url == "heads, automatic" and requests == ("4/s", 1)
        return answers(["a", "x" if wrong else "b"], 0.1)

    monkeypatch.setattr(serve, "server", Server)
    monkeypatch.setattr(serve, "requests", lambda load, number, *_: (load.name, number))
    monkeypatch.setattr(serve, "ask", ask)
    rows = [row.to_dict() for row in serve.run(options, SILENT)]
    turns = ["plain", "heads, automatic", "plain", "plain", "heads, automatic", "plain"]
    assert planned[2:8] == [(url, ("1/s", i // 3)) for i, url in enumerate(turns)]
    assert rows[0]["failed"] == "no room" and rows[0]["arm"] == "heads, dynamic 4"
    assert [row["arm"] for row in rows[1:]] == 2 * ["plain", "heads, automatic", AGAIN]
    assert rows[2]["requests"] == 4 and rows[4]["requests"] == 4
    assert rows[5]["failed"] == "1 of 4 answers differ from plain vLLM's"


def test_the_same_seed_gives_the_same_requests():
    planned = requests(PROMPTS, 300, 5)
    assert planned == requests(PROMPTS, 300, 5) != requests(PROMPTS, 300, 6)
    kinds = {each.kind: each for each in planned}
    assert len(kinds) == 11 and {"tools", "schema", "cancelled stream", "malformed"} <= kinds.keys()
    assert all(
        each.body["temperature"] == 0 or "seed" in each.body for each in planned if each.compared
    )


def test_answers_are_verified():
    compared = Request("x", COMPLETION, {"prompt": "a"})
    refused = Request("x", COMPLETION, {"prompt": "a"}, compared=False, refused=True)
    free = Request("x", COMPLETION, {"prompt": "a"}, compared=False)
    good, other = Answer(texts={0: "b"}, reasons={0: "stop"}), Answer(texts={0: "c"})
    wanted = {compared.key: vars(good)}
    assert not problem_of(compared, good, wanted)
    assert "plain" in problem_of(compared, other, wanted)
    for planned in (compared, refused, free):
        assert "lost" in problem_of(planned, "TimeoutError: ", wanted)
    assert not problem_of(refused, Answer(error=(400, "BadRequestError")), wanted)
    for status in (500, None):
        assert problem_of(refused, Answer(error=status and (status, "x")), wanted)
    assert not problem_of(free, other, wanted)
    assert problem_of(free, Answer(error=(500, "x")), wanted)
