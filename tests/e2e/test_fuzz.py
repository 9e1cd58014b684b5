"""A short round of `support.fuzz`, and checks that it detects errors; see `make fuzz MINUTES=N`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.fuzz.cases import request_case
from support.fuzz.comparing import difference, fuzz_round, reproduction
from support.fuzz.running import Answer, Models, Said

pytestmark = pytest.mark.engine

ENGINE, REQUESTS = 24, 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def test_equals_plain_vllm(models: Models) -> None:
    """Few blocks, priorities, cached prefixes, a random tree; some prompts as embeddings."""
    seeds = [1000 * ENGINE + i for i in range(REQUESTS)]
    found, again = fuzz_round(models, ENGINE, seeds), reproduction(ENGINE, seeds)
    assert not found.wrong and not found.run.problem, f"{found}\n{again}"
    assert found.run.preemptions > 0 and found.run.accepted > 50
    assert len(found.unsteady) + found.refused <= REQUESTS / 6


CHANGES: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": [5, 7]},
    "text": {"text": "ba"},
    "reason": {"finish_reason": "stop"},
    "logprobs": {"logprobs": [{5: (1, -0.5)}, {6: (1, -0.7)}]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_differences_are_detected(name: str) -> None:
    said = Said([5, 6], "ab", [{5: (1, -0.5)}, {6: (1, -0.5)}], "length", None, -1.0)
    request = replace(request_case(1), abort_after=None)
    assert difference(request, Answer({0: said}), Answer({0: replace(said)})) == ""
    assert difference(request, Answer({0: said}), Answer({0: replace(said, **CHANGES[name])}))
