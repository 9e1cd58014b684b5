"""Options of `calibrate` and `tree`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.options import AtLeastZero, Number, Options, Positive, Source, group, option
from vllm_medusa.training.options import MachineOptions
from vllm_medusa.tree.topology import MAX_NODES

Drafted = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # no tree takes more


class CalibrateOptions(Options):
    """Options of `vllm_medusa.calibration.calibrate.calibrate` and of `vllm-medusa calibrate`."""

    model: Source = option("the target: a folder or a hub name", positional=True)
    heads: Path = option("the heads' folder", positional=True)
    data: Path = option("records, as JSON lines", "-i")
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse: do nothing while the file has a bad line; skip: leave it out", default="refuse"
    )
    positions: Positive | None = option(
        "use only the first records, with about N generated tokens", default=None, metavar="N"
    )
    temperature: AtLeastZero | None = option(
        "use only records sampled at this temperature", default=None
    )
    top_k: Drafted = option("choices of each head looked at", default=10, metavar="R")
    machine: MachineOptions = group("machine", factory=MachineOptions)


class TreeOptions(Options):
    """Options of `vllm_medusa.calibration.choose.choose_tree` and of `vllm-medusa tree`."""

    heads: Path = option("the heads' folder, calibrated", positional=True)
    num_draft_tokens: Drafted = option("nodes, root excluded", "-n", default=16, metavar="N")
    max_depth: Positive | None = option("heads used; absent: all", default=None, metavar="D")
    draw: Path | None = option("a picture: .png, .svg or .pdf", default=None, metavar="FILE")
    output: Path | None = option("the tree as JSON, too", "-o", default=None, metavar="FILE")
    dry_run: bool = option("leave the heads' config as it is", default=False)
