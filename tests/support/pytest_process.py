"""Run tests in another pytest process, whose Triton, runner or vLLM differs from this one's.

Engines use vLLM's V2 model runner if Triton's interpreter is enabled before vLLM is imported
(`support.triton_on_cpu`). To run one of the tests selected in `tests/v2` that way manually:

    PYTHONPATH=tests python -m pytest -p support.triton_on_cpu tests/e2e/test_equality.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_pytest(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run the tests that pytest's ``arguments`` select; none may fail or be skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        cwd=REPOSITORY,
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, summary
