"""`vllm-medusa --version` and `doctor`: what is installed, and what works on this machine."""

from __future__ import annotations

import logging
import logging.handlers
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_medusa import __version__, plugin
from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.config import loggers_left_alone
from vllm_medusa.files import free_bytes
from vllm_medusa.offline.engine import free_share, medusa_config, refuse_unserved
from vllm_medusa.offline.machine import describe_machine, fast_bfloat16, format_machine
from vllm_medusa.options import Model, Options, Source, option

DOCTOR = """\
Check what works on this machine, and print the reason and the remedy for what does not: vLLM and
its platform, the plugin, compilers, memory, disk and optional packages. With a target, and heads or
a drafter for it, check that an engine would accept them.
---
Marks: ok; NO: required and does not work; - : optional, or slower than possible.
No weights are loaded; `vllm-medusa inspect HEADS --target MODEL` also looks for damaged values.
Exit status: 0 if everything required works, 1 if not."""

EXTRAS = ("train", "parquet", "ray", "bench")
_DEFAULT_SHARE = 0.92  # of the memory, which vLLM reserves


class DoctorOptions(Options):
    """Options of `vllm-medusa doctor`."""

    model: Model | None = option("a target: a folder or a hub name", positional=True, default=None)
    heads: Source | None = option("heads or a drafter for it", positional=True, default=None)


def versions() -> str:
    """What is installed and the device, one per line; a CPU build of torch is not imported."""
    name, version = plugin.installed_vllm()
    return (
        f"vllm-medusa {__version__}\n"
        f"vLLM {f'{version} ({name})' if version else 'is not installed'}\n"
        f"torch {metadata.version('torch')}\nPython {platform.python_version()}\n"
        f"device: {format_machine(describe_machine()).partition(', load')[0]}"
    )


def run(options: DoctorOptions, progress: ConsoleProgress) -> int:
    """Print the result of each check; returns 1 if something required does not work."""
    print(versions())
    status = 0
    with _only_errors_logged():
        for name, check in _checks(options):
            try:
                with progress.console.status(f"checking {name}"):  # on a terminal
                    mark, text = "ok", check()
            except UserWarning as error:  # optional, or slower than possible
                mark, text = "- ", str(error)
            except Exception as error:  # importing vLLM and compiling may raise anything
                mark, text, status = "NO", str(error) or type(error).__name__, 1
            print(f"{mark} {name}: {text}", flush=True)
    return status


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    logger = logging.getLogger("vllm")
    level = logger.level
    logging.disable(logging.INFO)
    logger.setLevel(logging.ERROR)
    try:
        with loggers_left_alone():
            yield
    finally:
        logger.setLevel(level)
        logging.disable(logging.NOTSET)


def _checks(options: DoctorOptions) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and function of each check; most are skipped without a supported vLLM."""
    for extra in EXTRAS:
        yield f"extra {extra}", partial(_extra, extra)
    yield "disk", _disk
    yield "vLLM", plugin.find_platform
    if plugin.version_problem():
        return
    yield "plugin", plugin.find_entry_point
    from vllm_medusa.kernels import cpu_library, uses_kernel

    if describe_machine()["gpus"]:
        yield "Triton", lambda: "installed" if uses_kernel("cuda") else ""
    else:
        yield "instructions", _instructions
        yield "memory", _memory
        yield "C++ kernels", lambda: "compiled" if cpu_library() else ""
        yield "torch.compile", _compile
    if options.model is not None:
        yield "engine", partial(_engine, options.model, options.heads)


def _extra(extra: str) -> str:
    """Look for the packages of an extra, as listed in this package's own metadata."""
    needed = re.compile(rf"""([\w.-]+).*extra == ['"]{extra}['"]""").match
    names = [found[1] for found in map(needed, metadata.requires("vllm-medusa") or ()) if found]
    if missing := [name for name in names if find_spec(name) is None]:
        raise UserWarning(f"no {', '.join(missing)}: pip install 'vllm-medusa[{extra}]'")
    return "installed"


def _disk() -> str:
    free = {place: free_bytes(place) for place in (Path.cwd(), Path.home() / ".cache")}
    text = ", ".join(f"{size / 1e9:.1f} GB free in {place}" for place, size in free.items())
    if min(free.values()) < 1 << 30:
        raise UserWarning(f"{text}: free some for models, results and compiled kernels")
    return text


def _instructions() -> str:
    import torch

    amx = ", AMX" if getattr(torch.cpu, "_is_amx_tile_supported", bool)() else ""
    text = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}{amx}"
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UserWarning(f"{text}: only x86-64 has been tested")
    if not fast_bfloat16():
        raise UserWarning(f"{text}, without bfloat16: --dtype float32 may be several times as fast")
    return text


def _memory() -> str:
    if shutil.which("lscpu") is None:
        raise RuntimeError(
            "vLLM does not start on a CPU without lscpu: install util-linux (Debian: apt install "
            "util-linux), or add its folder to PATH"
        )
    free = free_share()
    text = f"{free:.0%} free; LLM reserves {_DEFAULT_SHARE:.0%} by default"
    if free < _DEFAULT_SHARE:
        raise UserWarning(f"{text}: set gpu_memory_utilization={0.8 * free:.2f} for LLM")
    return text


def _compile() -> str:
    import torch

    try:
        torch.compile(lambda x: x.exp() + 1)(torch.zeros(16))
    except Exception as error:
        raise RuntimeError(
            f"{str(error).strip().partition(chr(10))[0]}. By default vLLM compiles models: install "
            "g++ and Python's headers (Debian: apt install g++ python3-dev), or --enforce-eager"
        ) from None
    return "works"


def _engine(model: str, heads: str | None) -> str:
    plugin.find_entry_point()  # without it, vLLM's own error has no remedy
    config = medusa_config(heads, {} if heads else {"lookup": True})
    logger, ours = logging.getLogger("vllm.medusa"), logging.handlers.BufferingHandler(100)
    logger.addHandler(ours)
    logger.setLevel(logging.WARNING)
    try:
        refuse_unserved({"model": model, "speculative_config": config})
    finally:
        logger.removeHandler(ours)
        logger.setLevel(logging.NOTSET)
    text = f"{model} with {heads or 'lookup'} would start"
    if warnings := [record.getMessage() for record in ours.buffer]:
        raise UserWarning(f"{text}. {' '.join(warnings)}")
    return text
