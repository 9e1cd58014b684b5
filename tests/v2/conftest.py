from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def plain_seeded(chaotic_llama: str) -> Any:
    """Plain vLLM's outcome of `one_of_each`; on V2, seeds give other tokens than on V1."""
    from support.engines import engine
    from support.outcomes import one_of_each, outcomes

    with engine(chaotic_llama) as llm:
        return outcomes(llm, *one_of_each())
