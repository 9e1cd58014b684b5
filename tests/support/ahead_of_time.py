"""Compile the kernels that a call would launch, for GPUs that are not present.

The interpreter runs Triton's language as Python and so accepts code that no compiler does. Here the
call's own arguments determine types and constants; nothing is launched, so results are garbage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

    before = driver._active
    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


@contextmanager
def needed(capability: int = 90) -> Iterator[set[tuple[str, str]]]:
    """Launches do nothing; yields the kernels that would be compiled: name and key."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    keys: set[tuple[str, str]] = set()

    def note(self: Any, key: str, *args: Any) -> None:
        keys.add((self.fn.__name__, key))

    before, compile_it = driver._active, JITFunction._do_compile
    active = _Driver(capability)
    active.device = -capability  # for which nothing has been compiled
    driver.set_active(active)
    JITFunction._do_compile = note
    try:
        yield keys
    finally:
        JITFunction._do_compile = compile_it
        driver._active = before
