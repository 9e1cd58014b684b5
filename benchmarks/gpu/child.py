"""The process in which the cases of one part run; `isolation` starts it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu.cases import Case, Lab, run_cases
from benchmarks.gpu.clock import CudaClock, HostClock
from benchmarks.gpu.storage import Storage

PARTS = {  # part -> the module whose function `cases` lists them
    "machine": "benchmarks.gpu.machine",
    "attention": "benchmarks.gpu.attention_checks",
    "kernels": "benchmarks.gpu.step_checks",
    "decode": "benchmarks.gpu.decode_checks",
    "speed": "benchmarks.gpu.kernel_speed",
    "tiles": "benchmarks.gpu.tile_sweep",
    "step": "benchmarks.gpu.decode_step",
    "vllm": "benchmarks.gpu.end_to_end",
}
CACHE_LIMIT = 40 << 30  # bytes of keys and values in one case


def part_cases(part: str, small: bool) -> list[Case]:
    """The cases of a part, the most telling first; ``small``: what an interpreter can run."""
    cases: list[Case] = importlib.import_module(PARTS[part]).cases(small)
    assert len({case.name for case in cases}) == len(cases), part
    return cases


def make_lab(machine: dict[str, object], interpret: bool) -> Lab:
    """The device of this process, and what is known of it."""
    import torch

    if interpret:
        return Lab("cpu", HostClock(), Storage("cpu", 1 << 26), machine, interpreted=True)
    if not torch.cuda.is_available():
        return Lab("cpu", HostClock(), Storage("cpu", 0), machine)
    properties = torch.cuda.get_device_properties(0)
    limit = min(CACHE_LIMIT, int(0.4 * properties.total_memory))
    clock = CudaClock(getattr(properties, "L2_cache_size", 0))
    return Lab("cuda", clock, Storage("cuda", limit), machine)


def main() -> int:
    """Run the named cases of a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--names", type=Path, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--machine", type=Path, required=True, help="JSON, numbers of the machine")
    parser.add_argument("--interpret", action="store_true")
    arguments = parser.parse_args()
    machine = json.loads(arguments.machine.read_text(encoding="utf-8"))
    names = arguments.names.read_text(encoding="utf-8").splitlines()
    lab = make_lab(machine, arguments.interpret)
    return run_cases(part_cases(arguments.part, arguments.interpret), names, lab, arguments.lines)


if __name__ == "__main__":
    sys.exit(main())
