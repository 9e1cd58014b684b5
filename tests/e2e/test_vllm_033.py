"""vLLM 0.33's Python with trees, over the CPU kernels of the installed vLLM.

Only if its files are available (see `support.overlay`). Each test runs some of 0.32's tests in a
separate pytest process, in which 0.33 is found first.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.overlay import VARIABLE, build, pytest_command, python_files_of_033

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        python_files_of_033() is None,
        reason=f"{VARIABLE} does not point to the Python files of vLLM 0.33",
    ),
]

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    files = python_files_of_033()
    assert files is not None
    return build(files, tmp_path_factory.mktemp("vllm033"))


def run(environment: dict[str, str], *arguments: str) -> None:
    """Run end-to-end tests on 0.33; none may fail or be skipped."""
    done = subprocess.run(
        pytest_command(*arguments),
        env=environment,
        capture_output=True,
        text=True,
        cwd=TESTS.parents[1],
    )
    summary = done.stdout.strip().rpartition("\n")[2]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", summary) and "skipped" not in summary, summary


@pytest.mark.parametrize(
    ("file", "selection"),
    [
        ("test_equality.py", "8_nodes or 14_nodes or reference"),
        ("test_refusals.py", ""),
        ("test_requests.py", ""),
        ("test_serve.py", ""),
        ("../worker/test_vllm_interfaces.py", ""),
        ("../unit/worker/test_engine_args.py", ""),
    ],
)
def test_the_v1_runner(environment: dict[str, str], file: str, selection: str) -> None:
    if file == "test_serve.py":
        pytest.importorskip("orjson", reason="0.33's server needs orjson, which 0.32's does not")
    run(environment, str(TESTS / file), "-k", selection)


def test_the_v2_runner(environment: dict[str, str]) -> None:
    pytest.importorskip("triton", reason="the V2 runner needs Triton, at least its interpreter")
    run(
        environment, "-p", "support.triton_on_cpu", str(TESTS / "test_equality.py"), "-k", "8_nodes"
    )
