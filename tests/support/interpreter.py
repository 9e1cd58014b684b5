"""Tests of Triton kernels on a CPU, in a process that interprets Triton from its first import.

Whether a kernel is interpreted is fixed when it is decorated; for Triton's own functions, when
Triton is first imported. Other tests of a session import vLLM and with it Triton, so unless
the whole session interprets, such tests run in a separate process.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from support.pytest_process import run_pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
IN_INTERPRETER = pytest.mark.skipif(
    not INTERPRETING,
    reason="runs in a process whose Triton interprets (unit/test_other_processes.py)",
)
NOT_INTERPRETING = pytest.mark.skipif(INTERPRETING, reason="this process interprets Triton")


@functools.cache
def speed_up() -> None:
    """Make the interpreter faster, in a process that interprets all its kernels.

    It patches Triton's language around every launch and every function that a kernel calls, and
    makes a new type and shape for every value. Here the language is patched once and types are
    cached.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    _remember_types(tl.core)
    _remember_conversions(tl.core, interpreter)
    _check_integers(interpreter)


def _remember_types(core: Any) -> None:
    """One type for all blocks of a shape, and one shape for all tensors of that shape."""
    make, equal = core.block_type.__init__, core.dtype.__eq__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(s, "value", s) for s in shape)
        if key not in known:
            make(self, element_ty, shape)
            self.sizes, self.others = tuple(self.shape), {}
            shape = core.tuple([core.constexpr(size) for size in self.sizes])
            self.of_tensors = shape, core.constexpr(math.prod(self.sizes))
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if scalar_ty.name not in self.others:
            self.others[scalar_ty.name] = core.block_type(scalar_ty, self.shape)
        return self.others[scalar_ty.name]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors

    core.dtype.sizes, core.dtype.of_tensors = (), (core.tuple([]), core.constexpr(1))
    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    core.block_type.with_element_ty = with_element_ty
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_conversions(core: Any, interpreter: Any) -> None:
    """Operands of one type and shape need no conversion, and a number becomes one block."""
    semantic = type(interpreter.interpreter_semantic)
    convert = semantic.binary_op_type_checking_impl
    numbers: dict[tuple[Any, ...], Any] = {}

    def converted(self: Any, lhs: Any, rhs: Any, *pointers: bool, **more: bool) -> Any:
        number, given = (lhs, rhs) if type(rhs) is core.tensor else (rhs, lhs)
        if type(number) is core.tensor:
            alike = lhs.shape is rhs.shape and lhs.dtype is rhs.dtype
            if alike and not (lhs.dtype.is_ptr() or more or pointers[2:]):
                return lhs, rhs
        if type(number) not in (int, float) or type(given) is not core.tensor:
            return convert(self, lhs, rhs, *pointers, **more)
        key = given.type.name, type(number), number, pointers, *more.items()
        if key in numbers:
            return (numbers[key], rhs) if given is rhs else (lhs, numbers[key])
        found = convert(self, lhs, rhs, *pointers, **more)
        if number and found[given is rhs] is given:  # 0.0 and -0.0 are equal
            numbers[key] = found[given is lhs]
        return found

    semantic.binary_op_type_checking_impl = converted


def _check_integers(interpreter: Any) -> None:
    """Refuse sums and products that overflow; the interpreter's own check omits them."""
    import numpy as np

    compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    builder = interpreter.interpreter_builder

    def check(lhs: Any, rhs: Any, binary_op: Any) -> None:
        dtype = lhs.dtype
        if dtype.int_bitwidth in (1, 64) or not builder.options.sanitize_overflow:
            return
        name = binary_op.__name__
        exact = compute[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        lowest, highest = dtype.get_int_min_value(), dtype.get_int_max_value()
        if exact.min() < lowest or exact.max() > highest:
            raise OverflowError(f"{name} of {dtype} gives {exact.min()} to {exact.max()}")

    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check


def trust_integers() -> None:
    """Disable the overflow check for integers, for whole engines.

    Their kernels are tested with the check in `tests/unit`.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def run_interpreting(selection: str, *files: str) -> None:
    """Run the tests of ``files`` that match pytest's ``-k selection``; none may fail or skip."""
    run_pytest("-k", selection, *files, environment={"TRITON_INTERPRET": "1"})
