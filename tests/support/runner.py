"""Which of vLLM's model runners this process tests; one suite covers both.

On V2 every kernel runs in Python (`support.triton_on_cpu`), so tests are smaller there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

ON_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"


def sized(on_v1: T, on_v2: T) -> T:
    return on_v2 if ON_V2 else on_v1


@contextmanager
def on_v1() -> Iterator[None]:
    """Engines started within the block run on V1, whichever runner this process tests.

    On V1 plain vLLM is five times as fast as with the interpreter, and gives the same tokens at
    temperature 0: V2's trees are then compared with V1's tokens. Seeds give other tokens on V2.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        yield


@contextmanager
def async_scheduling() -> Iterator[None]:
    """Engines started within the block schedule ahead, which vLLM disables on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield
