"""Run tests again in a process whose engines use vLLM's V2 model runner.

In a separate process, because Triton's interpreter must be enabled before vLLM is imported
(`support.triton_on_cpu`). To run any test that way manually:

    PYTHONPATH=tests python -m pytest -p support.triton_on_cpu tests/e2e/test_equality.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parents[2]
MARKS = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),  # the first test waits for the whole process
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]
Outcomes = dict[str, dict[str, str]]  # file or test -> case -> the failure ("" if none)


def once_more(suite: list[str]) -> tuple[Any, Any]:
    """A fixture that runs the suite in one process, to be named ``outcomes``, and its test."""

    @pytest.fixture(scope="module")
    def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
        return _run(suite, tmp_path_factory.mktemp("v2") / "report.xml")

    @pytest.mark.parametrize("selected", suite)
    def test_on_v2(outcomes: Outcomes, selected: str) -> None:
        cases = outcomes[selected]
        assert cases, "nothing ran"
        wrong = [f"{name}: {text}" for name, text in cases.items() if text]
        assert not wrong, "\n\n".join(wrong)[-8000:]

    return outcomes, test_on_v2


def _run(selected: list[str], report: Path) -> Outcomes:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.triton_on_cpu", "-p"]
    command += ["no:cacheprovider", "--timeout", "900", f"--junitxml={report}", *selected]
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if not report.exists():
        pytest.fail(f"pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    found: Outcomes = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "")
        wrong = "\n".join(
            f"{child.tag}: {child.text}" for child in case if child.tag != "system-out"
        )
        for test in (file, f"{file}::{name.partition('[')[0]}"):
            found[test][name] = wrong
    return found
