"""Kernel selection and compilation: Triton, C++ for CPUs, `torch.compile` for row functions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FUSED_WIDTH = 4096  # min elements of a row for `fused` to compile
CPU_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # codes of the C++ kernels


@functools.cache
def cpu_library() -> Any:
    """The C++ kernels, compiled for this machine (about eight seconds) and cached by torch.

    Uses torch's compiler driver, as `torch.compile` does.

    Raises:
        RuntimeError: There is no C++ compiler.

    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    parts = (
        "vectors.h",
        "noise.cpp",
        "scorer/attention.cpp",
        "scorer/trees.cpp",
        "proposer/choices.cpp",
        "proposer/beam.cpp",
        "proposer/hydra.cpp",
        "proposer/eagle.cpp",
        "sampler/greedy.cpp",
        "kv/cpu.cpp",
        "lookup/search.cpp",
    )
    source = "\n".join((Path(__file__).parent / part).read_text() for part in parts)
    try:
        return CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "trees on CPUs are drafted and verified by C++ kernels, which need a C++ compiler "
            "as torch.compile does: install g++ (Debian: apt install g++), or set CXX"
        ) from error


def cpu_function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """A C++ kernel of these ctypes types; the first call compiles all kernels."""

    @functools.cache
    def found() -> Any:
        function = getattr(cpu_library(), name)
        function.argtypes, function.restype = arguments, result
        return function

    return lambda *given: found()(*given)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for functions of wide rows; the number of rows may vary.

    Runs uncompiled if the rows of the first argument have fewer than `FUSED_WIDTH` elements, where
    compilation (a few seconds) does not pay off, and, with a warning, if compilation fails.
    """
    compiled: Callable[..., Any] | None = None
    failed = False

    @functools.wraps(function)
    def call(rows: Tensor, *others: Tensor) -> Any:
        nonlocal compiled, failed
        if failed or rows.shape[-1] < FUSED_WIDTH:
            return function(rows, *others)
        import torch._dynamo  # takes seconds to import
        import torch._inductor.exc

        if compiled is None:
            compiled = torch.compile(function)
        for given in (rows, *others):
            torch._dynamo.maybe_mark_dynamic(given, 0)
        try:
            return compiled(rows, *others)
        except torch._inductor.exc.InductorError as error:
            failed = True
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"compilation failed, so this is several times slower: {reason}", stacklevel=2
            )
            return function(rows, *others)

    return call


@functools.cache
def uses_kernel(device_type: str) -> bool:
    """Whether to use Triton on a device: on a GPU, and on a CPU in interpreter mode.

    Raises:
        ImportError: Triton is required and is not installed.

    """
    installed = find_spec("triton") is not None
    if device_type == "cpu":
        return installed and interpreted()
    if not installed:
        raise ImportError(
            f"Medusa on {device_type} requires Triton, which is not installed. Install it with "
            "`pip install triton`."
        )
    return True


def interpreted() -> bool:
    """Whether Triton interprets kernels in Python; decided by TRITON_INTERPRET at import."""
    import triton
    import triton.language as tl

    return not isinstance(tl.zeros, triton.JITFunction)
