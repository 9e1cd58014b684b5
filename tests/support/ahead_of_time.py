"""Compile the kernels that a call would launch, for GPUs that are not present.

The interpreter runs Triton's language as Python and so accepts code that no compiler does. Here the
call's own arguments determine types and constants; nothing is launched, so results are garbage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

GENERATIONS = (80, 90, 100)  # A100, H100, B200


class _Driver:
    """A minimal driver that selects the compilation target."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.device = capability  # compiled kernels are cached by device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, Any]]:
    """Launches only compile; yields the compiled kernels by name."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.asm["cubin"], self.fn.__name__
        compiled[self.fn.__name__] = kernel
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Driver(capability))
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled


@contextmanager
def needed() -> Iterator[set[tuple[str, str]]]:
    """Launches do nothing; yields the kernels that would be compiled: name and key."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    keys: set[tuple[str, str]] = set()

    def note(self: Any, key: str, *args: Any) -> None:
        keys.add((self.fn.__name__, key))

    active = _Driver(GENERATIONS[1])
    active.device = -1  # for which nothing has been compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", active)
        patch.setattr(JITFunction, "_do_compile", note)
        yield keys
