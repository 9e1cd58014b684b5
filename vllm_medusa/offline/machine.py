"""Description of the machine, for reports of measurements."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_medusa.job import plural

_CGROUPS = (  # versions 2 and 1: memory limit, usage and statistics of a container
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GB, load average, and GPUs if any."""
    import psutil

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []  # empty: not Linux
    names = [line for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = []
    if not metadata.version("torch").endswith("+cpu"):
        import torch  # takes seconds

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.machine(),
        "cores": cores,
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "gpus": gpus,
    }


def available_memory() -> int:
    """Available memory in bytes, of the machine or this container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for folder, limit, used in _CGROUPS:
        try:
            maximum, now = (int(Path(folder, name).read_text()) for name in (limit, used))
            lines = Path(folder, "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such file; "max"
            continue
        cached = next((line.split()[1] for line in lines if line.startswith("inactive_file ")), "0")
        free = min(free, maximum - now + int(cached))
    return max(0, free)


def fast_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions."""
    import torch

    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)


def format_machine(machine: dict[str, Any]) -> str:
    """Format it as one line."""
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return (
        f"{plural(machine['cores'], 'core')} of {machine['cpu']}{gpus}, {machine['memory_gb']} GB "
        f"of memory, load average {machine['load_average_at_start']} at the start"
    )
