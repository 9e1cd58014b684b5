"""Run tests again in a process whose engines use vLLM's V2 model runner.

In a separate process, because Triton's interpreter must be enabled before vLLM is imported
(`support.triton_on_cpu`). To run any test that way manually:

    PYTHONPATH=tests python -m pytest -p support.triton_on_cpu tests/e2e/test_equality.py
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from support.pytest_process import REPOSITORY, run_pytest

MARKS = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]


def run_on_v2(*selected: str) -> None:
    """Run these files and tests; each must exist, and none may fail or be skipped."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    plugin = ("-p", "support.triton_on_cpu", "--timeout", "900")
    run_pytest(*plugin, *selected, environment={"PYTHONPATH": path})
