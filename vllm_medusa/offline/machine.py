"""What a measurement ran on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GB, load average, and GPUs if any."""
    import psutil
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []  # none: not Linux
    names = [line for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.machine(),
        "cores": cores,
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def machine_in_words(machine: dict[str, Any]) -> str:
    """One line of it."""
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ""
    return (
        f"{machine['cores']} cores of {machine['cpu']}{gpus}, {machine['memory_gb']} GB of memory, "
        f"load average {machine['load_average_at_start']} at the start"
    )
