"""What calibration is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.options import AtLeastZero, Number, Options, Positive, Source, group, option
from vllm_medusa.training.options import MachineOptions
from vllm_medusa.tree.topology import MAX_NODES

Drafted = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # no tree takes more
Algorithm = Literal["walk", "independence"]


class CalibrateOptions(Options):
    """Options of `vllm_medusa.calibration.calibrate.calibrate` and of `vllm-medusa calibrate`."""

    model: Source = option("the target: a folder or a hub name", positional=True)
    heads: Path = option("the heads' folder", positional=True)
    data: Path = option("records, as JSON lines", "-i")
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse: do nothing while the file has a bad line; skip: leave it out", default="refuse"
    )
    limit: Positive | None = option("use only the first N records", default=None, metavar="N")
    positions: Positive | None = option(
        "use only the first records, with about N generated tokens", default=None, metavar="N"
    )
    temperature: AtLeastZero | None = option(
        "use only records sampled at this temperature", default=None
    )
    max_text_tokens: Positive | None = option(
        "longer texts are bad lines", default=None, metavar="N"
    )
    plot: Path | None = option("a picture: .png, .svg or .pdf", default=None, metavar="FILE")
    top_k: Drafted = option("choices of each head looked at", default=10, metavar="R")
    tree: str | None = option(
        "what walks decode with; absent: the best tree of 63 nodes for these texts", default=None
    )
    batch_tokens: Positive = option("at a time", default=4096)
    machine: MachineOptions = group("machine", factory=MachineOptions)


class MeasureOptions(Options):
    """Which prompts are decoded with the tree, and how."""

    prompts: Path | None = option(
        "prompts, or records whose prompts are used", "--measure", default=None, metavar="FILE"
    )
    target: Source | None = option("the target: a folder or a hub name", default=None)
    sizes: tuple[Positive, ...] = option(
        "draft nodes to measure; absent: all", default=(), metavar="N"
    )
    max_tokens: Positive = option("of each text", default=128)
    limit: Positive | None = option("only the first N prompts", default=None, metavar="N")
    samples: Positive = option("texts of each prompt", default=1)
    temperature: AtLeastZero | None = option("absent: the calibration's; 0: greedy", default=None)
    seed: int = option("text i uses the seed SEED + i", default=0)
    machine: MachineOptions = group(factory=MachineOptions)

    def check(self) -> None:
        """Refuse sizes without prompts, and prompts without a target."""
        if self.prompts is None and self.sizes:
            raise ValueError("--sizes says what to measure; give --measure PROMPTS too.")
        if self.prompts is not None and self.target is None:
            raise ValueError(f"--measure {self.prompts} needs the target: --target MODEL.")


class TreeOptions(Options):
    """Options of `vllm_medusa.calibration.choose.choose_tree` and of `vllm-medusa tree`."""

    heads: Path = option("the heads' folder, calibrated", positional=True)
    num_draft_tokens: Drafted = option("nodes, root excluded", "-n", default=16, metavar="N")
    algorithm: Algorithm = option(default="walk")
    max_depth: Positive | None = option("heads used; absent: all", default=None, metavar="D")
    max_rank: Positive | None = option(
        "choices of each head; absent: all calibrated", default=None, metavar="R"
    )
    step_cost: Path | None = option(
        'JSON of draft nodes to a step\'s time, 0 for plain decoding, such as {"0": 9.1, "4": '
        '10.2, "16": 14}: take the size that gives most tokens per time',
        default=None,
        metavar="FILE",
    )
    draw: Path | None = option("a picture: .png, .svg or .pdf", default=None, metavar="FILE")
    output: Path | None = option("the tree as JSON, too", "-o", default=None, metavar="FILE")
    dry_run: bool = option("leave the heads' config as it is", default=False)
    measuring: MeasureOptions = group(
        "measuring (the tree, by decoding other prompts)", factory=MeasureOptions
    )
