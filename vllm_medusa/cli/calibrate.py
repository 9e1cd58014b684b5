"""`vllm-medusa calibrate`: accuracy and confidence of heads on text that the target wrote."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_medusa.calibration.options import CalibrateOptions
from vllm_medusa.cli.console import (
    ConsoleProgress,
    figures,
    hide_loading_bars,
    invocation,
    stdout_console,
)
from vllm_medusa.offline.prompts import require_file

if TYPE_CHECKING:
    from vllm_medusa.calibration.calibrate import Calibrated

_SHOWN_RANKS = 5

TEXT = """\
Measure the heads on text that they were not trained on: the accuracy of each choice of each head,
at all positions and at those that decoding reaches, and the calibration of their confidence. The
observations are saved with the heads (calibration.safetensors), a summary in their config.json;
`vllm-medusa tree` builds the tree from them. If killed, the same command resumes.
---
Data: records of `vllm-medusa distill`, preferably of held-out prompts. Use text of the target,
sampled as it will be when served: temperature 0 for greedy serving. Other text is accepted with a
warning, but is less representative."""


def run(options: CalibrateOptions, progress: ConsoleProgress) -> int:
    """Calibrate, and print the results."""
    require_file(options.data, "records")  # before torch is imported
    from vllm_medusa.calibration.calibrate import calibrate

    hide_loading_bars()
    _print(calibrate(options, progress, invocation()))
    progress.note(
        f"saved in {options.heads}; next: vllm-medusa tree {options.heads} --num-draft-tokens N"
    )
    return 0


def _print(found: Calibrated) -> None:
    out, observations, accuracy = stdout_console(), found.observations, found.accuracy
    temperature = observations.temperature()
    wrote = "not the target's own" if temperature is None else f"temperature {temperature:g}"
    out.print(
        f"{len(observations.ranks)} positions of {observations.num_texts} texts, {wrote}. In %, "
        "best choice first; asked: the best choice at positions that decoding reaches (steps).",
        soft_wrap=True,
    )
    shown = min(_SHOWN_RANKS, observations.num_ranks)
    choices = [f"choice {rank}" for rank in range(shown)]
    names = ("head", *choices, f"best {observations.num_ranks}", "asked", "ECE", "fitted T")
    table = figures(*names, box=None, header_style="bold")
    for head, (row, fit) in enumerate(zip(accuracy.overall, found.fits, strict=True)):
        table.add_row(
            str(head),
            *(_percent(share) for share in row[:shown]),
            _percent(row.sum()),
            f"{_percent(accuracy.walked[head, 0])} ({accuracy.asked[head, 1]})",
            _percent(found.summary["calibration_error"][head][0]),
            "-" if fit is None else f"{fit.temperature:.2f}",
        )
    out.print(table)
    out.print(
        f"decoding with the best tree of {found.tree.num_draft_tokens} draft nodes gives "
        f"{found.tau:.3f} tokens per step",
        soft_wrap=True,
    )


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f}"
