"""The stage that says which of the target's texts are for what."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vllm_medusa.files import write_json
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.prompts import settle_bad_lines
from vllm_medusa.options import Options, Share, option
from vllm_medusa.training.heldout import split_records

COUNTS = "counts.json"


class SplitOptions(Options):
    """Options of `split_texts`."""

    data: Path = option("records")
    output: Path = option("folder for the parts")
    heldout_share: Share = option("of the prompts")
    on_bad_line: Literal["refuse", "skip"] = option(default="refuse")


def split_texts(options: SplitOptions, progress: Progress = SILENT) -> None:
    """Write the records to train, to calibrate and to measure on, and counts of them.

    Raises:
        ValueError: too few prompts, or a bad line that is not to be skipped.

    """
    counts, tokens, bad, disjoint = split_records(
        options.data, options.output, options.heldout_share
    )
    settle_bad_lines(options.data, bad, options.on_bad_line, progress)
    document = {"prompts": counts, "tokens": tokens, "left_out": len(bad), "disjoint": disjoint}
    write_json(options.output / COUNTS, document)
    progress.note("  prompts: {} to train on, {} to calibrate on, {} to measure on".format(*counts))
