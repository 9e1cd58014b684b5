"""Options of `calibrate` and `tree`."""

from __future__ import annotations

from pathlib import Path

from vllm_medusa.offline.options import OnBadLine, TreeSize
from vllm_medusa.options import Model, Options, Positive, group, option
from vllm_medusa.training.options import MachineOptions


class CalibrateOptions(Options):
    """Options of `vllm_medusa.calibration.calibrate.calibrate` and of `vllm-medusa calibrate`."""

    model: Model = option("the target: a folder or a hub name", positional=True)
    heads: Path = option("the heads' folder", positional=True)
    data: Path = option("records, as JSON lines", "-i")
    on_bad_line: OnBadLine = option("bad lines: refuse the file, or skip them", default="refuse")
    positions: Positive | None = option(
        "use only the first records, with about N generated tokens", default=None, metavar="N"
    )
    machine: MachineOptions = group("machine", factory=MachineOptions)


class TreeOptions(Options):
    """Options of `vllm_medusa.calibration.choose.choose_tree` and of `vllm-medusa tree`."""

    heads: Path = option("the heads' folder, calibrated", positional=True)
    num_draft_tokens: TreeSize = option("nodes without the root", "-n", default=16, metavar="N")
