"""Tests of Triton kernels on a CPU: in a process whose Triton interprets from its first import on.

Whether a kernel is interpreted is fixed when it is decorated, that of Triton's own functions when
Triton is first imported. Other tests of the same session import vLLM and with it Triton, so unless
the whole session interprets, such tests run in a process of their own.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def speed_up() -> None:
    """Halve what the interpreter takes, in a process that interprets all its kernels.

    Around every launch it makes Triton's language Python's and undoes that, and does so once more
    in every function that a kernel calls; here it is done once. It also builds a table of types
    for every value that it computes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    find, known = interpreter._get_np_dtype, {}

    def _get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = _get_np_dtype


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
