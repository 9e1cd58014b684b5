"""vLLM 0.33 on a CPU, for which there are no builds: its Python over the installed kernels.

It is used unmodified. This shows that our wiring fits 0.33's Python; its own
compiled kernels, and so everything on CUDA, are not tested.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The folder that contains the `vllm` folder of the 0.33 wheel; no compiled file is needed.
VARIABLE = "VLLM_MEDUSA_TEST_VLLM_033"


def python_files_of_033() -> Path | None:
    """The folder of 0.33's files, if configured."""
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return None
    if not (Path(setting) / "vllm" / "_version.py").is_file():
        pytest.fail(f"{VARIABLE} is {setting}, which holds no vLLM: no vllm/_version.py")
    return Path(setting)


def installed() -> Path:
    """The folder that contains the installed package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed"
    return Path(spec.origin).parents[1]


def build(python_files: Path, folder: Path, version: str = "0.33.0+cpu") -> dict[str, str]:
    """Overlay 0.33 on the installed kernels in ``folder``; returns the environment that uses it.

    The ``+cpu`` in the version tells vLLM for which platform it was built.
    """
    package = folder / "vllm"
    package.mkdir()
    for entry in (python_files / "vllm").iterdir():
        if entry.suffix != ".so" and entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for kernels in (installed() / "vllm").glob("*.so"):
        (package / kernels.name).symlink_to(kernels)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    tests = Path(__file__).parents[1]
    dropped = ("PYTEST_CURRENT_TEST", VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(folder), str(tests), str(tests.parent), *given])
    return kept | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def pytest_command(*arguments: str) -> list[str]:
    """A separate session, because a process can have only one vLLM."""
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
