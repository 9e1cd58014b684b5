"""The CPU path against the fp64 reference; every cache is NaN wherever no tree may read.

Tolerances: fp32 results differ by summation order, ``1e-5`` is 80 ulp of outputs near 1. The half
types add one rounding of the output, half an ulp of its largest value (4 and 2**-8, 4 and 2**-11).
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_trees import Case, make_case

from vllm_medusa.scorer.cpu import plan_trees, tree_attention

# Linux refuses AMX tiles to a process with a signal stack too small for them.
WITHOUT_TILES = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [(key, ctypes.c_size_t) for key in ("address", "flags", "size")]
libc, memory = ctypes.CDLL(None), ctypes.create_string_buffer(4096)
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
assert libc.syscall(158, 0x1023, 18) == -1  # arch_prctl, ARCH_REQ_XCOMP_PERM
import torch
from support.paged_trees import make_case
print(make_case([20], [40], dtype=torch.bfloat16, isa="amx", block=32).error())
"""
BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, BF16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 5))
    isa = draw(st.sampled_from(("vec", "vec16", "amx")))
    size = st.integers(1, 20)
    even = draw(st.booleans())
    sizes = [draw(size)] * batch if even else [draw(size) for _ in range(batch)]
    return make_case(
        sizes,
        [draw(st.integers(0, 100)) for _ in range(batch)],
        heads=draw(st.sampled_from(((4, 2), (3, 3), (4, 1), (6, 2)))),
        dim=draw(st.sampled_from((32, 64))),
        block=32 if isa == "amx" else draw(st.sampled_from((16, 32))),
        dtype=torch.bfloat16 if isa == "amx" else draw(st.sampled_from(tuple(TOLERANCE))),
        window=draw(st.sampled_from((None, 1, 3, 16, 20, 50))),
        shape=draw(st.sampled_from(("random", "chain", "star"))),
        isa=isa,
        gap=draw(st.sampled_from((0, 2))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=150)
@given(cases(), st.sampled_from((0.0, 2.0)), st.booleans())
def test_equals_the_reference(case, softcap, with_sinks):
    sinks = torch.linspace(-2, 3, case.query.shape[1]) if with_sinks else None
    assert case.error(softcap, sinks) < TOLERANCE[case.query.dtype]


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 256])
@pytest.mark.parametrize("base", [0, 1, 15, 16, 17])
def test_boundaries_of_trees_and_blocks(nodes, base):
    assert make_case([nodes], [base]).error() < 1e-5
    assert make_case([nodes], [base], dtype=torch.bfloat16).error() < 4 * 2**-8


@pytest.mark.parametrize("wrong", ["base", "blocks", "window", "depths", "rows", "ancestors"])
def test_wrong_metadata_is_detected(wrong):
    """Negative controls: the reference reads no metadata, so every wrong field must be detected."""
    case = make_case([16, 16], [40, 40], window=5)
    assert case.error() < 1e-5
    tree = case.tree
    fields = {
        "tree": tree,
        "base": case.base - int(wrong == "base"),
        "block_table": case.block_table.flip(0) if wrong == "blocks" else case.block_table,
        "window": 4 if wrong == "window" else 5,
        "row_starts": case.starts.flip(0) if wrong == "rows" else case.starts,
    }
    if wrong == "depths":
        fields["tree"] = replace(tree, depths=torch.arange(16).expand(2, -1))
    if wrong == "ancestors":
        ancestors = tree.ancestors.clone()
        ancestors[1, 15, 15] = False
        fields["tree"] = replace(tree, ancestors=ancestors)
    broken = plan_trees(layout=case.meta.layout, num_heads=4, **fields)
    assert not replace(case, meta=broken).error() < 1e-2  # nor is NaN


@pytest.mark.parametrize(("dtype", "isa"), [*((d, "vec16") for d in TOLERANCE), (BF16, "amx")])
@pytest.mark.parametrize("window", [None, 1900])
@pytest.mark.parametrize("sizes", [[1, 2], [5, 3], [40, 9]])
def test_long_contexts_are_split(dtype, isa, window, sizes):
    """Into parts; and rows into tiles of 8, which share chunks of keys, and items of 32."""
    block = 32 if isa == "amx" else 16
    options = {"heads": (4, 1), "dtype": dtype, "isa": isa, "block": block, "window": window}
    case = make_case(sizes, [2100, 5], **options)
    assert case.error(3.0, torch.linspace(-1, 1, 4)) < TOLERANCE[dtype]


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_a_process_without_permission_for_amx_tiles():
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TILES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert float(done.stdout) < TOLERANCE[torch.bfloat16]


def test_the_refusal_names_the_value_and_the_remedy():
    case = make_case([4], [5])
    with pytest.raises(TypeError, match=r"bfloat16.*float32.*--kv-cache-dtype auto"):
        tree_attention(case.query, case.kv_cache.bfloat16(), case.meta, 1.0)
