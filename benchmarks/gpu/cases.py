"""A case is one check or one measurement; whatever goes wrong in it costs that case alone.

Every case ends as a record with its name, how long it took, and a status:

    passed, failed    what it found; a measurement passes if what it timed was right
    error             it raised, crashed or hung; the traceback is in the record
    skipped           it can't be had here, or no time was left; the reason is in the record
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.clock import Clock

if TYPE_CHECKING:
    from benchmarks.gpu.storage import Storage

Record = dict[str, Any]
BROKEN = 3  # a child's exit status: its device can't be used any more by this process


class NotHere(Exception):
    """A case that can't be run on this machine; the message says why."""


@dataclass
class Lab:
    """What the cases of one process share."""

    device: str
    clock: Clock
    storage: Storage
    machine: Mapping[str, Any]  # numbers measured before; absent where that failed
    interpreted: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # such as a model that many cases time

    def synchronize(self) -> None:
        """Wait for the device; raises what an earlier launch did wrong."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


@dataclass(frozen=True)
class Case:
    """``run`` gives the record's own fields; "passed": False makes it failed.

    ``launch`` only launches the attention kernels that ``run`` will need, with tensors in host
    memory: that is how they are compiled ahead.
    """

    name: str
    run: Callable[[Lab], Record]
    launch: Callable[[], object] | None = None


def run_case(case: Case, lab: Lab) -> Record:
    """One record, whatever happens short of the process ending."""
    began = time.monotonic()
    record: Record
    try:
        found = dict(case.run(lab))
        lab.synchronize()
        record = {"status": "passed" if found.pop("passed", True) else "failed", **found}
    except NotHere as reason:
        record = {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        text = traceback.format_exc()
        record = {"status": "error", "reason": f"{type(error).__name__}: {error}"[:500]}
        record["traceback"] = text[-6000:]
    return {"name": case.name, "seconds": round(time.monotonic() - began, 3), **record}


def run_cases(cases: Sequence[Case], names: Sequence[str], lab: Lab, lines: Path) -> int:
    """Run the cases of these names; what starts and ends is a line of JSON each, at once.

    Returns an exit status: 0, or `BROKEN` where an error left the device unusable.
    """
    by_name = {case.name: case for case in cases}
    with lines.open("a", buffering=1, encoding="utf-8") as file:
        for name in names:
            file.write(json.dumps({"start": name}) + "\n")
            record = run_case(by_name[name], lab)
            file.write(json.dumps({"end": plain(record)}, allow_nan=False) + "\n")
            if record["status"] == "error" and _is_broken(lab):
                return BROKEN
    return 0


def _is_broken(lab: Lab) -> bool:
    try:
        lab.synchronize()
        if lab.device == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.ones(2, device="cuda").sum().item()
    except Exception:
        return True
    return False


def plain(value: Any) -> Any:
    """What strict JSON can hold: tuples as lists, numbers that aren't finite as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
