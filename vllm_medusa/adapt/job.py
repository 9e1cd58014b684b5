"""One adapt, from what is asked to the folder written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.adapt.checks import REPORT, check, written_by_adapt
from vllm_medusa.adapt.options import AdaptOptions, check_training, training_of
from vllm_medusa.adapt.stages import WorkFolder
from vllm_medusa.files import FileRefused, read_json
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.training.options import TrainOptions


@dataclass(frozen=True)
class Adapted:
    """Heads for a target."""

    output: Path
    document: dict[str, Any]  # of report.json
    made: bool  # False if the output had them already


def adapt(
    options: AdaptOptions,
    training: TrainOptions | None = None,
    progress: Progress = SILENT,
    command: Sequence[str] = (),
) -> Adapted:
    """Make heads for a target; killed at any point, the same call goes on.

    ``training`` has more of train's options than ``options``; files are adapt's own.

    Raises:
        ValueError, OSError: something has to be changed first; nothing has been begun.
        StageFailed: a stage broke off.

    """
    if training is None:
        training = training_of(options)
    check_training(options, training)
    plan = check(options, training, progress)
    output = options.files.output
    existing = written_by_adapt(output)
    if existing == plan.key and not options.files.overwrite:
        return Adapted(output, read_json(output / REPORT), made=False)
    if existing is not None and not options.files.overwrite:
        raise FileRefused(
            f"{output} holds heads of another adapt: other options, prompts or weights. Pass "
            "--overwrite to replace them, or name another --output."
        )
    # after the check that all that these need is installed
    from vllm_medusa.adapt.pipeline import count_stages, run_stages
    from vllm_medusa.adapt.report import collect, publish

    with WorkFolder(options.work_folder, count_stages(plan), progress) as work:
        run_stages(plan, work)
        document = collect(plan, work.finished, command)
        publish(plan, document, work.finished)
    return Adapted(output, document, made=True)
