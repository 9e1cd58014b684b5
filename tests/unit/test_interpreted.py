"""All kernels through Triton's interpreter, in a process whose Triton interprets."""

from pathlib import Path

import pytest
from support.interpreter import NOT_INTERPRETING, run_interpreting

TESTS = Path(__file__).parents[1]
FILES = [*TESTS.glob("unit/*/test_kernel.py"), *TESTS.glob("gpu/test_[dt]*.py")]


@NOT_INTERPRETING
def test_all_kernels():
    pytest.importorskip("triton")
    run_interpreting("TestInterpreted", *map(str, sorted(FILES)))
