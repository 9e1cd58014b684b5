"""All kernels in other processes: in Triton's interpreter, and compiled by another release.

GPU builds of torch bring their own Triton: `VARIABLE` is a folder that contains one
(`pip install --no-deps --target FOLDER triton==3.6.0`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreter import NOT_INTERPRETING, run_interpreting

VARIABLE = "VLLM_MEDUSA_TEST_TRITON"
ROOT = Path(__file__).parents[2]
FILES = sorted(map(str, ROOT.glob("tests/unit/*/test_kernel.py")))


@NOT_INTERPRETING
def test_interpreted():
    pytest.importorskip("triton")
    on_gpu = sorted(map(str, ROOT.glob("tests/gpu/test_[dt]*.py")))
    run_interpreting("TestInterpreted", *on_gpu, *FILES)


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")
def test_other_triton():
    folder = str(Path(os.environ[VARIABLE]).resolve())
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    which = "import pytest, triton; print(triton.__file__); raise SystemExit(pytest.main())"
    done = subprocess.run(
        [sys.executable, "-c", which],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTEST_ADDOPTS": " ".join(["-q -p no:cacheprovider -k it_compiles", *FILES]),
        },
    )
    assert done.stdout.startswith(folder), f"{folder} has no Triton; found {done.stdout[:200]}"
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 18
