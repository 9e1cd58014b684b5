"""What calibration is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.options import AtLeastZero, Number, Options, Positive, group, option, required
from vllm_medusa.training.options import MachineOptions
from vllm_medusa.tree.topology import MAX_NODES

Drafted = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # no tree takes more
Algorithm = Literal["walk", "independence"]


class CalibrateOptions(Options):
    """Options of `vllm_medusa.calibration.calibrate.calibrate` and of `vllm-medusa calibrate`."""

    model: str = required("the target: a folder or a hub name", positional=True)
    heads: Path = required("the heads' folder", positional=True)
    data: Path = required("records, as JSON lines", "-i")
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse", "refuse: do nothing while the file has a bad line; skip: leave it out"
    )
    limit: Positive | None = option(None, "use only the first N records", metavar="N")
    temperature: AtLeastZero | None = option(None, "use only records sampled at this temperature")
    max_text_tokens: Positive | None = option(None, "longer texts are bad lines", metavar="N")
    plot: Path | None = option(None, "a picture: .png, .svg or .pdf", metavar="FILE")
    top_k: Drafted = option(10, "choices of each head looked at", metavar="R")
    tree: str | None = option(
        None, "what walks decode with; absent: the best tree of 63 nodes for these texts"
    )
    batch_tokens: Positive = option(4096, "at a time")
    machine: MachineOptions = group(MachineOptions, "machine")


class MeasureOptions(Options):
    """Which prompts are decoded with the tree, and how."""

    prompts: Path | None = option(
        None, "prompts, or records whose prompts are used", "--measure", metavar="FILE"
    )
    target: str | None = option(None, "the target: a folder or a hub name")
    sizes: tuple[Positive, ...] = option((), "draft nodes to measure; absent: all", metavar="N")
    max_tokens: Positive = option(128, "of each text")
    limit: Positive | None = option(None, "only the first N prompts", metavar="N")
    samples: Positive = option(1, "texts of each prompt")
    temperature: AtLeastZero | None = option(None, "absent: the calibration's; 0: greedy")
    seed: int = option(0, "text i uses the seed SEED + i")
    machine: MachineOptions = group(MachineOptions)

    def check(self) -> None:
        """Refuse sizes without prompts, and prompts without a target."""
        if self.prompts is None and self.sizes:
            raise ValueError("--sizes says what to measure; give --measure PROMPTS too.")
        if self.prompts is not None and self.target is None:
            raise ValueError(f"--measure {self.prompts} needs the target: --target MODEL.")


class TreeOptions(Options):
    """Options of `vllm_medusa.calibration.choose.choose_tree` and of `vllm-medusa tree`."""

    heads: Path = required("the heads' folder, calibrated", positional=True)
    num_draft_tokens: Drafted = option(16, "nodes, root excluded", "-n", metavar="N")
    algorithm: Algorithm = option("walk")
    max_depth: Positive | None = option(None, "heads used; absent: all", metavar="D")
    max_rank: Positive | None = option(
        None, "choices of each head; absent: all calibrated", metavar="R"
    )
    step_cost: Path | None = option(
        None,
        'JSON of draft nodes to a step\'s time, 0 for plain decoding, such as {"0": 9.1, "4": '
        '10.2, "16": 14}: take the size that gives most tokens per time',
        metavar="FILE",
    )
    draw: Path | None = option(None, "a picture: .png, .svg or .pdf", metavar="FILE")
    output: Path | None = option(None, "the tree as JSON, too", "-o", metavar="FILE")
    dry_run: bool = option(False, "leave the heads' config as it is")
    measuring: MeasureOptions = group(
        MeasureOptions, "measuring (the tree, by decoding other prompts)"
    )
