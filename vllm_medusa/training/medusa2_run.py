"""A run of Medusa-2: the heads alone, then with an adapter in the target, which is merged."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from vllm_medusa.files import free_bytes
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.results import fingerprint
from vllm_medusa.training import lora
from vllm_medusa.training.curves import draw_curves
from vllm_medusa.training.hidden_cache import DTYPES, HiddenStates
from vllm_medusa.training.job import Job
from vllm_medusa.training.joint_measure import release_target
from vllm_medusa.training.medusa1 import Medusa1
from vllm_medusa.training.medusa2 import Medusa2
from vllm_medusa.training.medusa2_result import clear_results, publish
from vllm_medusa.training.merging import save_adapter
from vllm_medusa.training.recipe import JointRecipe
from vllm_medusa.training.state import TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.texts import Texts


def train_medusa2(job: Job) -> None:
    """Train heads alone, then with the target, and write both; goes on where it was killed.

    Raises:
        ValueError: a dtype without gradients, or no room for the held-out states.

    """
    joint, heldout = job.options.joint, job.heldout
    assert heldout is not None, "`TrainOptions.check` sees to it"
    if job.dtype == torch.float16:  # a token's share of a step's gradient is about 1e-5 and less
        raise ValueError(
            "the target computes in float16, in which the gradients of a backbone underflow. Train "
            "it with --dtype bfloat16 (or float32); what is stored keeps the target's own dtype."
        )
    _require_room(job, heldout)
    recipe = JointRecipe.of(
        joint,
        job.options.training,
        bf16=job.recipe.bf16,
        self_distilled=all(record.temperature is not None for record in job.inputs.train),
    )
    job.settings |= {
        "start_heads": _fingerprint(joint.start_heads),
        "joint": asdict(recipe),
        "save": joint.save,
        "bounds": asdict(joint.bounds),
    }
    workers = job.workers
    with job.open() as run:
        if run.complete:
            return
        if workers.main:
            clear_results(run.output)  # of a run that --overwrite throws away
        origin = job.provenance()
        target = job.load_target()
        lora.adaptable_modules(target.model, joint.lora.modules)  # refused before the warm-up
        _check_space(job, run, target)
        heads = _first_heads(job, target)
        original = job.states(target, heldout, run.work, job.dtype, job.cache_bytes)
        job.build(original)  # all of them fit: see `_require_room`
        if joint.start_heads is None and not (run.work / "state.pt").exists():
            _warm_up(job, run, target, heads, original)
        trained = _train_jointly(job, run, target, heads, original, recipe)
        del target
        workers.wait()
        if workers.main:
            if job.options.machine.quantization is not None:
                original = _unquantised(job, run, original)
            publish(job, run, heads, original, trained, origin)
            run.finish()
        workers.wait()


def _warm_up(
    job: Job, run: TrainingRun, target: Target, heads: MedusaHeads, original: HiddenStates
) -> None:
    """Train the heads alone."""
    cache, workers = job.options.cache, job.workers
    bytes_left = job.cache_bytes - original.cached_bytes
    states = job.states(target, job.texts, cache.cache or run.work, job.cache_dtype, bytes_left)
    job.build(states)
    folder = run.work / "warm-up"
    with TrainingRun(folder, {}, main=workers.main) as alone:
        trainer = Medusa1(target, heads, states, original, job.recipe, alone, workers)
        trainer.train(job.report("warm-up"))
    states.release()
    workers.wait()
    if workers.main:
        shutil.copyfile(folder / "training" / "log.jsonl", run.folder / "warm-up.jsonl")
        if not cache.keep_cache:
            states.remove()


def _train_jointly(
    job: Job,
    run: TrainingRun,
    target: Target,
    heads: MedusaHeads,
    original: HiddenStates,
    recipe: JointRecipe,
) -> dict[str, int]:
    """Train heads and adapter, and keep the adapter in a folder; returns steps and tokens."""
    workers = job.workers
    adapted = lora.attach(target.model, recipe.lora, seed=recipe.seed)
    trainer = Medusa2(target, adapted, heads, job.inputs.train, original, recipe, run, workers)
    share = sum(p.numel() for p in trainer.adapter.values()) / sum(
        p.numel() for p in target.model.parameters()
    )
    job.progress.note(
        f"joint stage: {trainer.steps} steps, {trainer.tokens} tokens; the adapter is "
        f"{share:.1%} of the target; {recipe.lm_loss} for the target, lambda_0 "
        f"{recipe.heads_weight.peak:g} ({recipe.heads_weight.growth})"
    )
    trainer.train(job.report("joint"))
    if workers.main:
        save_adapter(adapted, run.work / "adapter")
        draw_curves(run.entries(), run.folder / "curves.png", f"Medusa-2 on {job.inputs.source}")
    else:
        original.release()  # the main process may remove them
    return {"joint_steps": trainer.steps, "joint_tokens": trainer.tokens}


def _unquantised(job: Job, run: TrainingRun, original: HiddenStates) -> HiddenStates:
    """States of what is merged, which was never quantised, instead of the quantised target's."""
    original.remove()
    target = Target.load(job.inputs.source, dtype=job.dtype, device=job.workers.device)
    states = job.states(
        target, original.texts, run.work, job.dtype, job.cache_bytes, quantization=None
    )
    states.build()
    return release_target(states)


def _first_heads(job: Job, target: Target) -> MedusaHeads:
    if job.options.joint.start_heads is None:
        return job.new_heads(target)
    heads, _ = load_heads(
        job.options.joint.start_heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=torch.float32,
        device=job.workers.device,
    )
    return heads


def _require_room(job: Job, heldout: Texts) -> None:
    """Refuse held-out states that --cache-gb has no room for."""
    needed = heldout.num_rows * job.inputs.fingerprint["hidden_size"] * job.dtype.itemsize
    limit = job.options.cache.cache_gb
    if needed > limit * 1e9:
        raise ValueError(
            f"the original's hidden states on held-out text take {needed / 1e9:.3g} GB, all of "
            f"which have to be kept, and --cache-gb is {limit:g}. Raise it, or hold out less text."
        )


def _check_space(job: Job, run: TrainingRun, target: Target) -> None:
    """Refuse to start what the disk can't hold in the end: the merged model."""
    stored = DTYPES.get(job.inputs.dtype or "", job.dtype)
    wanted = sum(p.numel() for p in target.model.parameters()) * stored.itemsize
    free = free_bytes(run.work)
    if wanted > free:
        raise ValueError(
            f"the new target takes {wanted / 1e9:.1f} GB, and {run.output} has {free / 1e9:.1f} GB "
            "free. Name another disk by --output."
        )


def _fingerprint(heads: Path | None) -> str | None:
    if heads is None:
        return None
    if not heads.exists():
        raise ValueError(f"--start-heads {heads}: no such file or folder.")
    return fingerprint(heads)
