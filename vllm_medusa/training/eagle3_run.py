"""A run of EAGLE-3's training: a drafter on the frozen target, whose states are computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vllm_medusa.heads.eagle_model import EagleDrafter, EagleShape
from vllm_medusa.training import eagle3
from vllm_medusa.training.auxiliary import AuxiliaryStates
from vllm_medusa.training.curves import draw_curves
from vllm_medusa.training.eagle3 import Eagle3
from vllm_medusa.training.export import round_to, save_trained
from vllm_medusa.training.hidden_cache import DTYPES, HiddenStates
from vllm_medusa.training.job import Job
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts


def train_eagle3(job: Job) -> None:
    """Train a drafter and write it; goes on where the run was killed."""
    with job.open() as run:
        if run.complete:
            return
        origin = job.provenance()
        target = job.load_target()
        source = AuxiliaryStates(target, job.layers)
        shown = ", ".join(map(str, source.layers))
        job.progress.note(f"the drafter reads the inputs of the target's layers {shown}")
        heldout = Texts.whole(job.inputs.heldout) if job.inputs.heldout else None
        texts = Texts.whole(job.inputs.train)
        sources = job.sources(source, heldout, texts, run, layers=list(source.layers))
        job.build(*sources)
        longest = max(len(piece) for piece in texts.pieces(eagle3.PIECE_ROWS))
        recipe = replace(job.recipe, batch_rows=max(job.recipe.batch_rows, longest))
        trainer = Eagle3(
            target,
            new_drafter(job, target, sources[-1]),
            sources[-1],
            None if heldout is None else sources[0],
            job.inputs.train,
            job.inputs.heldout,
            recipe,
            run,
            job.workers,
        )
        trainer.train(job.report("training"))
        _save(job, trainer, run, origin)
        job.end(run, sources)


def new_drafter(job: Job, target: Target, states: HiddenStates) -> EagleDrafter:
    """An untrained drafter: the target's LM head, behind a norm as large as the target's states."""
    options, config = job.options, target.model.config.get_text_config()
    shape = EagleShape.of(config, job.layers, target.hidden_size, target.vocab_size)
    token_map = job.token_map(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.training.seed)
        drafter = EagleDrafter(shape, options.heads.num_heads, token_map)
    rows = slice(None) if token_map is None else token_map
    head = target.lm_head_weight.detach()[rows].float() * target.logit_scale
    span = range(min(8, len(states.texts.span_record)))
    sizes = [int(states.texts.first_row[i + 1] - states.texts.first_row[i]) for i in span]
    some = states.read([(i, 0, size) for i, size in zip(span, sizes, strict=True)])
    with torch.no_grad():
        drafter.lm_head.weight.copy_(head)
        drafter.norm.weight.copy_(some[:, -target.hidden_size :].square().mean(0).sqrt())
    drafter.frozen_lm_head = options.heads.lm_heads == "shared"
    drafter = drafter.to(target.device)
    drafter.embedding = target.embedding_weight.detach()
    return drafter


def _save(job: Job, trainer: Eagle3, run: TrainingRun, origin: dict[str, Any]) -> None:
    """Round the drafter to what is stored, measure that, draw the curves, write everything."""
    dtype = DTYPES[job.options.heads.save_dtype]
    round_to(trainer.heads, dtype)
    heldout = None if trainer.heldout is None else trainer.measure()
    if not run.main:
        return
    if heldout is not None:
        run.log({"step": trainer.step, "heldout": heldout})
    draw_curves(run.entries(), run.folder / "curves.png", f"EAGLE-3 on {job.inputs.source}")
    save_trained(
        run.output,
        trainer.heads,
        job.inputs.source,
        dtype=dtype,
        training={**job.settings, "steps": trainer.steps, "heldout": heldout},
        target=job.inputs.fingerprint,
        provenance=origin,
    )
