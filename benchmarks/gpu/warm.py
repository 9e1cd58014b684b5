"""Compile ahead, on all processors, what the cases of a part will launch.

A run needs more than a hundred variants of the attention kernel, each some seconds of compiling
on one processor; Triton keeps what it compiled in a folder that all processes share. Nothing here
touches the GPU: calls are made as the cases make them, with tensors in host memory that nobody
fills, and end where they would be launched. What isn't compiled here is compiled later, when it is
first launched, so a failure costs time and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Record
from benchmarks.gpu.child import PARTS, part_cases

MOST_PROCESSES = 14


class _Target:
    """A driver that knows what to compile for and can do nothing else."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """Of Triton's compiler."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


@contextmanager
def compiling(machine: Record) -> Iterator[list[str]]:
    """Launches compile only, for a device like this one; yields the kernels' names."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from vllm_medusa.scorer import launch, paged

    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        names.append(self.fn.__name__)
        return kernel

    limits = launch.DeviceLimits(machine["num_sms"], machine["shared_bytes"])
    kept = (launch.device_limits, paged.uses_kernel)
    driver.set_active(_Target(machine["capability"]))
    JITFunction.run = compile_only
    launch.device_limits = lambda device: limits  # type: ignore[assignment]
    paged.uses_kernel = lambda device_type: True  # type: ignore[assignment]
    try:
        yield names
    finally:
        JITFunction.run = run
        launch.device_limits, paged.uses_kernel = kept  # type: ignore[assignment]


def compile_share(part: str, share: int, shares: int, machine: Record) -> int:
    """Compile every ``shares``-th case of a part; returns how many launches that took."""
    with compiling(machine) as names:
        for case in [c for c in part_cases(part, False) if c.launch is not None][share::shares]:
            assert case.launch is not None
            try:
                case.launch()
            except Exception as error:
                print(f"{case.name}: {type(error).__name__}: {error}"[:400], flush=True)
    return len(names)


def start(parts: Sequence[str], machine: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    """One process for each processor but two, busy with all ``parts`` in this order."""
    shares = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2))
    started = []
    for share in range(shares):
        command = [sys.executable, "-m", "benchmarks.gpu.warm", *parts, "--machine", str(machine)]
        with (folder / f"warm-{'-'.join(parts)}-{share}.txt").open("w") as output:
            started.append(
                subprocess.Popen(
                    [*command, "--share", str(share), "--shares", str(shares)],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                )
            )
    return started


def finish(started: list[subprocess.Popen[bytes]], seconds: float) -> Record:
    """Wait, at most so long; then end what still runs."""
    began = time.monotonic()
    for process in started:
        try:
            process.wait(max(0.1, seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    waited = round(time.monotonic() - began, 1)
    done = sum(process.returncode == 0 for process in started)
    return {"processes": len(started), "finished": done, "waited_s": waited}


def main() -> None:
    """Compile a share of some parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--shares", type=int, default=1)
    arguments = parser.parse_args()
    machine = json.loads(arguments.machine.read_text(encoding="utf-8"))
    for part in arguments.parts:
        began = time.monotonic()
        count = compile_share(part, arguments.share, arguments.shares, machine)
        print(f"{part}: {count} launches, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
