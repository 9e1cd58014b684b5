"""Options of `calibrate` and `tree`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.options import AtLeastZero, Model, Number, Options, Positive, group, option
from vllm_medusa.training.options import MachineOptions
from vllm_medusa.tree.topology import MAX_NODES

Drafted = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # max of any tree


class CalibrateOptions(Options):
    """Options of `vllm_medusa.calibration.calibrate.calibrate` and of `vllm-medusa calibrate`."""

    model: Model = option("the target: a folder or a hub name", positional=True)
    heads: Path = option("the heads' folder", positional=True)
    data: Path = option("records, as JSON lines", "-i")
    on_bad_line: Literal["refuse", "skip"] = option(
        "bad lines: refuse the file, or skip them", default="refuse"
    )
    positions: Positive | None = option(
        "use only the first records, with about N generated tokens", default=None, metavar="N"
    )
    temperature: AtLeastZero | None = option(
        "use only records sampled at this temperature", default=None
    )
    top_k: Drafted = option("choices per head that trees may use", default=10, metavar="R")
    machine: MachineOptions = group("machine", factory=MachineOptions)


class TreeOptions(Options):
    """Options of `vllm_medusa.calibration.choose.choose_tree` and of `vllm-medusa tree`."""

    heads: Path = option("the heads' folder, calibrated", positional=True)
    num_draft_tokens: Drafted = option("nodes without the root", "-n", default=16, metavar="N")
    draw: Path | None = option("picture: .png, .svg or .pdf", default=None, metavar="FILE")
    output: Path | None = option("also write the tree as JSON", "-o", default=None, metavar="FILE")
    dry_run: bool = option("do not modify the heads' config", default=False)
