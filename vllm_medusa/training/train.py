"""Train heads for a target, from options to the output folder: common parts of all methods."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.files import read_json
from vllm_medusa.job import SILENT, Progress
from vllm_medusa.offline.records import write_records
from vllm_medusa.training.curves import draw_curves
from vllm_medusa.training.job import Job
from vllm_medusa.training.loop import Loop, NotFiniteError
from vllm_medusa.training.medusa2 import DEGRADED, MODEL, train_medusa2
from vllm_medusa.training.options import TrainOptions
from vllm_medusa.training.run import Stage, check_output
from vllm_medusa.training.workers import Workers


@dataclass(frozen=True)
class Trained:
    """The result of training."""

    output: Path  # folder of the heads
    summary: dict[str, Any]  # from their config.json: settings, accuracy, the target's quality
    main: bool = True  # False in other processes of a distributed run

    @property
    def degraded(self) -> bool:
        """Whether the new target degraded beyond the bounds."""
        return bool(self.summary.get("degraded"))

    @property
    def degradation(self) -> str:
        """How a target degraded, its location and the remedy."""
        return (
            f"{'; '.join(self.summary['shortfalls'])}. The model is in {self.model}, its heads "
            f"in {self.output}. Use them only if this is acceptable; else train with a smaller "
            "--heads-weight or --backbone-rate, or on more text."
        )

    @property
    def model(self) -> Path | None:
        """The new target of Medusa-2."""
        if self.summary["method"] != "medusa-2":
            return None
        return self.output / (DEGRADED if self.degraded else MODEL)


def train(
    options: TrainOptions, progress: Progress = SILENT, command: Sequence[str] = ()
) -> Trained:
    """Train heads; a killed run resumes, and ends with the same weights.

    Raises ValueError, OSError: invalid inputs; nothing was created, or the run is unchanged;
    NotFiniteError: a loss or gradient was NaN or infinite; the last good state is kept.
    """
    files = options.files
    inputs: dict[str, str | Path | None] = {
        "the target": options.model,
        "--data": files.data,
        "--heldout": files.heldout,
        "--start-heads": options.heads.start_heads,
    }
    workers = Workers(options.machine.device)
    try:
        if workers.main:  # others might check while this one creates the run
            check_output(files.output, inputs)
        else:
            progress = SILENT
        job = Job(options, workers, progress, command)
        (train_medusa2 if options.method == "medusa-2" else train_frozen)(job)
        if workers.main and files.heldout is None and job.heldout.records:
            write_records(files.output / "training" / "heldout.jsonl", job.heldout.records)
        summary = read_json(files.output / "config.json")["medusa"]["training"]
        return Trained(files.output, summary, workers.main)
    except (NotFiniteError, KeyboardInterrupt) as error:  # which occur in all processes
        if workers.main:
            raise
        sys.exit(error.status if isinstance(error, NotFiniteError) else 130)
    except (ValueError, OSError) as error:
        if workers.main:
            raise
        raise ValueError(f"in process {workers.rank}: {error}") from error


def train_frozen(job: Job) -> None:
    """Medusa-1 or EAGLE-3: train heads on the frozen target and write them."""
    with job.open() as run:
        if run.complete:
            return
        target = job.load_target()
        run.work.mkdir(exist_ok=True)
        method = job.create_method(target, run)
        stage = Stage(run)
        loop = Loop(method, stage)
        loop.train(job.report("training"))
        job.round(method.heads)
        found = method.measure()
        if run.main:
            if found is not None:
                stage.log({"step": loop.step, **found})
            name = "EAGLE-3" if job.layers else "Medusa-1"
            title = f"{name} on {job.source}"
            draw_curves(stage.entries(), run.folder / "curves.png", title)
            job.save(method.heads, {"steps": loop.steps, **(found or {"heldout": None})})
        job.release(method)
