"""What the machine is, and the rates that floors are computed from: copying and multiplying."""

from __future__ import annotations

import hashlib
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT
from benchmarks.gpu.cases import Case, Lab, NotHere, Record
from benchmarks.report import describe

NO_GPU = "torch finds no CUDA GPU"


def cases(small: bool) -> list[Case]:
    """The device, then its rates."""
    rates = [] if small else [Case("copy", copy), Case("read", read), Case("matmul", matmul)]
    return [Case("device", device), *rates]


def device(lab: Lab) -> Record:
    """Names and sizes; NotHere without a GPU, unless Triton interprets."""
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if lab.interpreted:
        return {"gpu": "none (Triton's interpreter)", "interpreted": True, **versions}
    if lab.device != "cuda":
        raise NotHere(NO_GPU)
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": properties.major * 10 + properties.minor,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", 0),
        "shared_bytes": getattr(properties, "shared_memory_per_block_optin", 99 * 1024),
        "cuda": torch.version.cuda,
        **driver(),
        **versions,
    }


def driver() -> Record:
    """Driver and clocks, as nvidia-smi has them; nothing if it isn't there."""
    fields = {
        "driver": "driver_version",
        "sm_clock_max_mhz": "clocks.max.sm",
        "power_limit_w": "power.limit",
    }
    query = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",")
    return dict(zip(fields, (value.strip() for value in values), strict=True))


def copy(lab: Lab) -> Record:
    """Bytes read plus bytes written of a large copy, over its time."""
    torch = _torch(lab)
    source = torch.empty(1 << 31, dtype=torch.uint8, device=lab.device).random_(0, 256)
    target = torch.empty_like(source)
    times = lab.clock.device(lab.clock.graph(lambda: target.copy_(source)), repeats=15)
    return {"copy_bytes_per_s": 2 * source.numel() / statistics.median(times) * 1e6}


def read(lab: Lab) -> Record:
    """Bytes of a large sum over its time: what reading alone can reach, for comparison."""
    torch = _torch(lab)
    source = torch.empty(1 << 29, dtype=torch.float32, device=lab.device).normal_()
    out = torch.empty((), dtype=torch.float32, device=lab.device)
    call = lab.clock.graph(lambda: torch.sum(source, dim=0, out=out))
    return {
        "read_bytes_per_s": 4 * source.numel() / statistics.median(lab.clock.device(call)) * 1e6
    }


def matmul(lab: Lab) -> Record:
    """Operations of a large bf16 product over its time."""
    torch = _torch(lab)
    size = 8192
    a, b = (
        torch.empty(size, size, dtype=torch.bfloat16, device=lab.device).normal_() for _ in range(2)
    )
    out = torch.empty_like(a)
    times = lab.clock.device(lab.clock.graph(lambda: torch.mm(a, b, out=out)))
    return {"matmul_flop_per_s": 2 * size**3 / statistics.median(times) * 1e6}


def _torch(lab: Lab) -> Any:
    if lab.device != "cuda":
        raise NotHere(NO_GPU)
    import torch

    return torch


def describe_host(commit: str | None) -> Record:
    """Processor, versions, commit; and a digest of the sources, for a copy without git."""
    host = describe()
    if commit:
        host["commit"] = commit
    return host | {"sources": sources_digest(ROOT)}


def sources_digest(root: Path) -> str:
    """Of the package and of this check: equal for equal sources, whatever git says."""
    digest = hashlib.sha256()
    for folder in ("vllm_medusa", "benchmarks/gpu"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
