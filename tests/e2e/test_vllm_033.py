"""vLLM 0.33's Python with trees, on the CPU kernels of the installed vLLM.

There are no CPU builds of 0.33. Its Python is used unmodified: this tests our integration with it,
but not its own compiled kernels, and so nothing on CUDA. Each test runs some of 0.32's tests in a
separate pytest process, in which 0.33 is found first.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from support.pytest_process import run_pytest

TESTS = Path(__file__).parents[1]
# The folder that contains the `vllm` folder of the 0.33 wheel; no compiled file is needed.
VARIABLE = "VLLM_MEDUSA_TEST_VLLM_033"


pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        VARIABLE not in os.environ,
        reason=f"{VARIABLE} does not point to the Python files of vLLM 0.33",
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables that select an overlay of 0.33 on the installed kernels."""
    python_files, folder = Path(os.environ[VARIABLE]) / "vllm", tmp_path_factory.mktemp("vllm033")
    if not (python_files / "_version.py").is_file():
        pytest.fail(f"{VARIABLE}: {python_files} holds no vLLM: no _version.py")
    spec = importlib.util.find_spec("vllm")  # does not import it
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    package = folder / "vllm"
    package.mkdir()
    for entry in python_files.iterdir():
        if entry.suffix != ".so" and entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for kernels in Path(spec.origin).parent.glob("*.so"):
        (package / kernels.name).symlink_to(kernels)
    version = "0.33.0+cpu"  # tells vLLM for which platform it was built
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(folder), str(TESTS), str(TESTS.parent), *given])
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize(
    ("file", "selection"),
    [
        ("test_equality.py", "8_nodes or 14_nodes or reference"),
        ("test_refusals.py", ""),
        ("test_requests.py", ""),
        ("test_serve.py", ""),
        ("../integration/test_vllm_interfaces.py", ""),
        ("../unit/integration/test_engine_args.py", ""),
    ],
)
def test_the_v1_runner(environment: dict[str, str], file: str, selection: str) -> None:
    if file == "test_serve.py":
        pytest.importorskip("orjson", reason="0.33's server needs orjson, which 0.32's does not")
    run_pytest(str(TESTS / "e2e" / file), "-k", selection, environment=environment)


def test_the_v2_runner(environment: dict[str, str]) -> None:
    pytest.importorskip("triton", reason="the V2 runner needs Triton, at least its interpreter")
    file = str(TESTS / "e2e" / "test_equality.py")
    run_pytest("-p", "support.triton_on_cpu", file, "-k", "8_nodes", environment=environment)
