import inspect
from collections.abc import Callable
from typing import Any

import pytest

from vllm_medusa.worker.overrides import LEDGER, override


def twice(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*args: Any) -> Any:
        return 2 * original(*args)

    return replacement


def make_owner() -> type:
    class Owner:
        """Stands for a class of vLLM."""

        def method(self, x: int) -> int:
            """Say x."""
            return x

        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        def of(cls, x: int) -> tuple[str, int]:
            return (cls.__name__, x)

    return Owner


def test_methods_stay_what_they_are():
    owner = make_owner()
    for name in ("method", "static", "of"):
        assert override(owner, name, twice)
    assert owner().method(3) == 6
    assert owner.static(3) == owner().static(3) == 6
    assert owner.of(3) == ("Owner", 3, "Owner", 3)
    assert owner.method.__doc__ == "Say x."
    assert isinstance(inspect.getattr_static(owner, "static"), staticmethod)
    assert isinstance(inspect.getattr_static(owner, "of"), classmethod)


def test_a_second_time_changes_nothing():
    owner = make_owner()
    for name in ("method", "static", "of"):
        override(owner, name, twice)
        first = inspect.getattr_static(owner, name)
        assert not override(owner, name, twice)
        assert inspect.getattr_static(owner, name) is first
    assert owner().method(3) == 6


def test_a_subclass_gets_none_of_it_by_accident():
    """Only the owner's own attribute is replaced; a class that has none is an error."""
    with pytest.raises(KeyError):
        override(type("Child", (make_owner(),), {}), "method", twice)


def test_the_ledger_answers_every_question():
    assert len({entry.target for entry in LEDGER}) == len(LEDGER)
    for entry in LEDGER:
        for answer in (entry.target, entry.why, entry.upstream, entry.gone_when):
            assert answer.strip(), entry
