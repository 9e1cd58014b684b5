"""A run of Medusa-1: heads on the frozen target, whose hidden states are computed once."""

from __future__ import annotations

from typing import Any

from vllm_medusa.training.curves import draw_curves
from vllm_medusa.training.export import round_to, save_trained
from vllm_medusa.training.hidden_cache import DTYPES
from vllm_medusa.training.job import Job
from vllm_medusa.training.medusa1 import Medusa1
from vllm_medusa.training.state import TrainingRun


def train_medusa1(job: Job) -> None:
    """Train heads and write them; goes on where the run was killed."""
    with job.open() as run:
        if run.complete:
            return
        origin = job.provenance()
        target = job.load_target()
        sources = job.sources(target, job.heldout, job.texts, run)
        job.build(*sources)
        heads = job.new_heads(target)
        measured = None if job.heldout is None else sources[0]
        trainer = Medusa1(target, heads, sources[-1], measured, job.recipe, run, job.workers)
        trainer.train(job.report("training"))
        _save(job, trainer, run, origin)
        job.end(run, sources)


def _save(job: Job, trainer: Medusa1, run: TrainingRun, origin: dict[str, Any]) -> None:
    """Round the heads to what is stored, measure that, draw the curves, write everything."""
    dtype = DTYPES[job.options.heads.save_dtype]
    round_to(trainer.heads, dtype)
    heldout = None if trainer.heldout is None else trainer.measure()
    if not run.main:
        return
    if heldout is not None:
        run.log({"step": trainer.step, "heldout": heldout})
    draw_curves(run.entries(), run.folder / "curves.png", f"Medusa-1 on {job.inputs.source}")
    save_trained(
        run.output,
        trainer.heads,
        job.inputs.source,
        dtype=dtype,
        training={**job.settings, "steps": trainer.steps, "heldout": heldout},
        target=job.inputs.fingerprint,
        provenance=origin,
    )
