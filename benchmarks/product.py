"""The package's commands, run as anyone would, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def vllm_medusa(*words: object) -> None:
    """Run a command; its GPU memory and threads end with it.

    Raises:
        RuntimeError: it failed; what it printed stands above.

    """
    command = [sys.executable, "-m", "vllm_medusa.cli", *map(str, words)]
    print("vllm-medusa", *words, file=sys.stderr, flush=True)
    if status := subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"vllm-medusa {words[0]} ended with status {status}")
