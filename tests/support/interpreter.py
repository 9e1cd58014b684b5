"""Tests of Triton kernels on a CPU: in a process whose Triton interprets from its first import on.

Whether a kernel is interpreted is fixed when it is decorated, that of Triton's own functions when
Triton is first imported. Other tests of the same session import vLLM and with it Triton, so unless
the whole session interprets, such tests run in a process of their own.
"""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def speed_up() -> None:
    """Cut what the interpreter takes to a third, in a process that interprets all its kernels.

    Around every launch it makes Triton's language Python's and undoes that, and does so once more
    in every function that a kernel calls; here it is done once. And for every value that it
    computes it makes types, shapes and conversions anew, of which there are few.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    find, known = interpreter._get_np_dtype, {}

    def _get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = _get_np_dtype
    _remember_types(tl.core)
    _remember_conversions(interpreter.interpreter_semantic)


def _remember_types(core: Any) -> None:
    """One type for all blocks of a shape, and one shape for all tensors that have it."""
    make, equal = core.block_type.__init__, core.dtype.__eq__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.cache
    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(s) for s in shape]), core.constexpr(math.prod(shape))

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(s, "value", s) for s in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_conversions(semantic: Any) -> None:
    """What two operands are converted to; and those of one shape are not broadcast."""
    find, broadcast = semantic.computation_type_impl, semantic.broadcast_impl_value

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    semantic.computation_type_impl = functools.cache(find)
    semantic.broadcast_impl_value = broadcast_impl_value


def trust_integers() -> None:
    """Look for no integer that overflows, half of all that is computed: for whole engines.

    Their kernels are run with the check, on their own, in `tests/unit`.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def run_interpreting(file: str, selection: str) -> None:
    """Run the tests of ``file`` that match pytest's ``-k selection``; none may fail or skip."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        selection,
        file,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, summary
