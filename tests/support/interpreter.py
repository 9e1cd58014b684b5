"""Tests of Triton kernels on a CPU, in a process that interprets Triton from its first import on.

Whether a kernel is interpreted is fixed when it is decorated; for Triton's own functions, when
Triton is first imported. Other tests of a session import vLLM and with it Triton, so unless
the whole session interprets, such tests run in a separate process.
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
    """Speed up the interpreter, in a process that interprets all its kernels.

    For every launch, and for every function that a kernel calls, it patches and restores
    Triton's language; here this is done once. For every value it
    computes, it creates types, shapes, constants and conversions again; here they are cached.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    _call_builtins_at_once(interpreter, tl.core)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    find, known = interpreter._get_np_dtype, {}

    def _get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = _get_np_dtype
    _unwrap_by_type(tl.core)
    _remember_types(tl.core)
    _remember_sizes(interpreter)
    _remember_operands(interpreter.interpreter_semantic, tl.core)
    _check_integers(interpreter)


def _call_builtins_at_once(interpreter: Any, core: Any) -> None:
    """Skip the wrapper that checks that they are called within a kernel."""
    wrapper = core.builtin(lambda: None).__code__
    semantic = interpreter.interpreter_semantic

    def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        direct = member.__wrapped__ if member.__code__ is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return direct(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = _patch_attr


def _unwrap_by_type(core: Any) -> None:
    """Values other than constants and tuples are returned unchanged."""
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {core.tensor, int, float, bool, type(None)}

    def _unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is constexpr else unwrap(o)

    core._unwrap_if_constexpr = _unwrap_if_constexpr


def _remember_types(core: Any) -> None:
    """One type for all blocks of a shape, and one shape for all tensors of that shape."""
    make, equal, to_ir = core.block_type.__init__, core.dtype.__eq__, core.dtype.to_ir
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    in_ir: dict[str, Any] = {}

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

    def scalar_to_ir(self: Any, builder: Any) -> Any:
        if self.name not in in_ir:
            in_ir[self.name] = to_ir(self, builder)
        return in_ir[self.name]

    core.dtype.sizes, core.dtype.of_tensors = (), (core.tuple([]), core.constexpr(1))
    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    core.block_type.with_element_ty = with_element_ty
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.dtype.to_ir = scalar_to_ir


def _remember_sizes(interpreter: Any) -> None:
    """Cache which NumPy values fit into which type."""
    look, known = interpreter._validate_np_data_size, {}
    every, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    compute = builder.binary_op

    def fits(data: Any, dtype: Any) -> bool:
        key = dtype.name, data.itemsize
        if key not in known:
            known[key] = look(data, dtype)
        return known[key]

    class TensorHandle(every):  # type: ignore[misc, valid-type]
        def __init__(self, data: Any, dtype: Any) -> None:
            self.data, self.dtype, self.attr = data, dtype, {}
            if not fits(data, dtype):
                self.__post_init__()  # which reports it

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype.char == "?":
            return compute(self, lhs, rhs, op)
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if not fits(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return TensorHandle(output, dtype)

    interpreter._validate_np_data_size, interpreter.TensorHandle = fits, TensorHandle
    builder.binary_op = binary_op


def _remember_operands(semantic: Any, core: Any) -> None:
    """Cache what two operands are converted to; NumPy itself broadcasts them to one shape."""
    tensor, block_type = core.tensor, core.block_type
    find = semantic.computation_type_impl = functools.cache(semantic.computation_type_impl)
    broadcast, prepare = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    constants: dict[tuple[Any, ...], Any] = {}
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    def broadcast_impl_value(lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    @functools.cache
    def joint(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...]:
        long, short = (lhs, rhs) if len(lhs) > len(rhs) else (rhs, lhs)
        pairs = zip(long, (1,) * (len(long) - len(short)) + short, strict=True)
        if any(one != other and 1 not in (one, other) for one, other in pairs):
            raise ValueError(f"shapes {lhs} and {rhs} don't match")
        return tuple(map(max, long, (1,) * (len(long) - len(short)) + short))

    def typed(one: Any, shape: tuple[int, ...]) -> Any:
        return one if one.type.sizes == shape else tensor(one.handle, block_of(one.dtype, shape))

    def block_of(dtype: Any, shape: tuple[int, ...]) -> Any:
        key = dtype.name, shape
        if key not in blocks:
            blocks[key] = block_type(dtype, list(shape))
        return blocks[key]

    def binary_op_type_checking_impl(
        lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False, *how: bool, **named: bool
    ) -> Any:
        if type(lhs) is not tensor or type(rhs) is not tensor:
            return with_number(lhs, rhs, lhs_ptr, rhs_ptr, *how, **named)
        one, other = lhs.dtype, rhs.dtype
        if one.is_ptr() or other.is_ptr():
            semantic.check_ptr_type_impl(one, other, lhs_ptr)
            semantic.check_ptr_type_impl(other, one, rhs_ptr)
        elif how or named:
            return prepare(lhs, rhs, lhs_ptr, rhs_ptr, *how, **named)
        elif one is not other:
            dtype = find(one, False, other, False, False)
            lhs, rhs = semantic.cast(lhs, dtype), semantic.cast(rhs, dtype)
        if lhs.shape is rhs.shape:
            return lhs, rhs
        shape = joint(lhs.type.sizes, rhs.type.sizes)
        return typed(lhs, shape), typed(rhs, shape)

    def with_number(lhs: Any, rhs: Any, *how: bool, **named: bool) -> Any:
        number, other = (rhs, lhs) if type(lhs) is tensor else (lhs, rhs)
        if type(other) is not tensor or not number or number != number:  # 0.0 equals -0.0
            return prepare(lhs, rhs, *how, **named)
        key = type(number), number, other is lhs, other.type.name, how, *named.items()
        if key not in constants:
            ready = prepare(lhs, rhs, *how, **named)
            if not any(one is other for one in ready):
                return ready
            (constants[key],) = (one for one in ready if one is not other)
            constants[key].handle.data.flags.writeable = False
        return (lhs, constants[key]) if other is lhs else (constants[key], rhs)

    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl


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
