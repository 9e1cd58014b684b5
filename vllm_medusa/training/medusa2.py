"""Medusa-2: heads and target trained together (https://arxiv.org/abs/2401.10774, section 2.2.2).

    L = L_LM + lambda_0 * sum over k of lambda_k * cross-entropy of head k

A warm-up stage trains the heads alone (`medusa1`). Then heads and a LoRA adapter in the target are
trained through one pass of the backbone, the heads at a multiple of the backbone's learning rate;
lambda_0 grows (`recipe.heads_weight`). On text that the target wrote, L_LM is KL(original ||
trained) at every generated token, the original being the same model with its adapter off (section
2.3.2); on other text it is the cross-entropy of the next token.

What it leaves behind::

    HEADS/config.json, model.safetensors     the heads; config.json's "medusa" has the results
    HEADS/target/                            the new target: transformers' folder, tokenizer and all
    HEADS/target-degraded/                   the same where quality fell beyond the bounds

Merging rounds the weights to the target's dtype, so everything is measured once more on the merged
model, read back from its files.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vllm_medusa.files import free_bytes, read_json, write_json
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.fingerprint import target_fingerprint
from vllm_medusa.heads.model import MedusaHeads
from vllm_medusa.offline.results import fingerprint
from vllm_medusa.training import lora
from vllm_medusa.training.accuracy import Measurement
from vllm_medusa.training.curves import draw_curves
from vllm_medusa.training.hidden_cache import CacheError, HiddenStates
from vllm_medusa.training.job import Job
from vllm_medusa.training.loop import Loop
from vllm_medusa.training.losses import CHUNK, IGNORED, LMHead, head_losses
from vllm_medusa.training.method import Batch, Groups, Method, Setup, Texts
from vllm_medusa.training.options import JointOptions
from vllm_medusa.training.quality import QualityMeter, kl_rows, shortfalls
from vllm_medusa.training.recipe import complete_joint, heads_weight
from vllm_medusa.training.rows import cut_pieces, labels_at, pad, split_passes
from vllm_medusa.training.run import Stage, TrainingRun
from vllm_medusa.training.target import Target
from vllm_medusa.training.workers import Workers

if TYPE_CHECKING:
    from peft import PeftModel

MODEL, DEGRADED = "target", "target-degraded"
_MEASURED_TOKENS = 4096  # per pass
_DIVERGED = (
    "So the new target, which is being trained, diverged: use a smaller --backbone-rate or "
    "--heads-weight."
)


class Medusa2(Method):
    """The joint stage: only the adapter and the heads are given to the optimizer."""

    heads: MedusaHeads
    lm_head: LMHead
    own = measures_ends = True

    def __init__(
        self,
        target: Target,
        adapted: PeftModel,  # wraps the target's model, with a fresh adapter (`lora.attach`)
        heads: MedusaHeads,
        joint: JointOptions,
        setup: Setup,  # whole texts; held-out spans with the original model's states
    ) -> None:
        super().__init__(heads, setup)
        self.target, self.adapted, self.joint = target, adapted, joint
        self.lm_head, self.teacher = target.lm_head_of(heads.token_map), target.lm_head
        self.adapter = lora.adapter_parameters(adapted)
        self.pass_rows, self.read_on = joint.pass_tokens, True
        if joint.checkpoint_layers:
            _checkpoint_layers(target.model)

    def parameters(self) -> Groups:
        """See `Method`."""
        return [(self.adapter.values(), 1.0), (self.heads.parameters(), self.joint.heads_rate)]

    def state(self) -> dict[str, Any]:
        """See `Method`."""
        return super().state() | {"adapter": {n: p.detach() for n, p in self.adapter.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """See `Method`."""
        super().load(state)
        with torch.no_grad():
            for name, parameter in self.adapter.items():
                parameter.copy_(state["adapter"][name])

    def weights(self, step: int, steps: int) -> Tensor:
        """See `Method`: 1 for the target's own loss, then lambda_0 lambda_k."""
        own = torch.ones(1, device=self.decay.device)
        return torch.cat([own, heads_weight(self.joint, step, steps) * self.decay])

    def loss(self, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
        """See `Method`; one pass of the backbone, two with a teacher."""
        records, device = batch.texts.records, self.workers.device
        ids, mask = (
            t.to(device) for t in pad([records[r].token_ids[:e] for r, _, e in batch.wanted])
        )
        distill, teacher = self.joint.lm_loss == "kl", None
        if distill or self.soft:
            with lora.original(self.adapted):
                teacher = self.target.hidden_states(ids, mask)[mask.bool()]  # [N, H]
        states = self.target.hidden_states(ids, mask)[mask.bool()]  # [N, H]
        labels = batch.labels
        own = lm_loss(states, labels[:, 0], self.target.lm_head, teacher if distill else None)
        soft = None
        if self.soft and teacher is not None:
            soft = self.teacher_of(batch, teacher.float())
        loss, sums = head_losses(  # the heads are fp32, and compute so unless autocast is on
            self.heads,
            self.heads(states.float()),
            labels[:, 1:],
            weights[1:],
            self.lm_head,
            teacher=soft,
        )
        return weights[0] * own + loss, torch.cat([own.detach().view(1), sums])

    def measure(self) -> dict[str, Any]:
        """Heads and quality on held-out text.

        Without autocast: the original's states were computed without it.
        """
        assert self.heldout is not None
        heads, quality = measure_joint(self.heads, self.target, self.heldout, self.workers)
        return {"heldout": heads, "quality": quality}

    def entry(self, means: Tensor, weights: Tensor) -> dict[str, Any]:
        """See `Method`."""
        own = {"lm_loss": float(means[0]), "lambda_0": float(weights[1] / self.decay[0])}
        return own | super().entry(means[1:], weights)


def lm_loss(
    states: Tensor,  # [N, H]
    following: Tensor,  # int64 [N], IGNORED where none
    lm_head: LMHead,
    teacher: Tensor | None = None,  # [N, H]
    *,
    chunk: int = CHUNK,  # positions whose logits exist at a time
) -> Tensor:
    """Sum over the counted positions of KL(teacher || student), or of the cross-entropy.

    Returns an fp32 scalar. It is exactly 0 where student and teacher are equal.
    """

    def part(at: Tensor) -> Tensor:
        logits = lm_head(states[at]).float()  # [C, V]
        if teacher is None:
            return F.cross_entropy(logits, following[at], reduction="sum")
        with torch.no_grad():
            wanted = lm_head(teacher[at]).float()
        return kl_rows(wanted, logits).sum()

    (counted,) = (following != IGNORED).nonzero(as_tuple=True)
    total = torch.zeros((), device=states.device)
    for at in counted.split(chunk):
        total = total + checkpoint(part, at, use_reentrant=False, preserve_rng_state=False)
    return total


@torch.no_grad()
def measure_joint(
    heads: MedusaHeads,
    target: Target,  # the new model; its LM head is the original's too
    heldout: Texts,  # whole spans, with the original model's states
    workers: Workers | None = None,  # hold a share of the pieces each; None: this process has all
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure heads (`Measurement.summary`) and target (`QualityMeter.result`).

    Raises:
        ValueError: the texts hold no generated token.
        CacheError: the target's states aren't finite.

    """
    total, meter = Measurement(heads.num_heads), QualityMeter(target.lm_head)
    draft_head = target.lm_head_of(heads.token_map)
    original, lengths = heldout.states, [piece.num_rows for piece in heldout.pieces]
    assert original is not None
    now = HiddenStates(
        target,
        heldout.records,
        original.ranges.tolist(),
        dtype=torch.float32,
        max_bytes=0,  # computed at every read, as the model changes
        file="held-out text",
        remedy=_DIVERGED,
    )
    for part in split_passes(range(len(lengths)), lengths, _MEASURED_TOKENS):
        wanted = [(p.record, p.start, p.limit) for p in (heldout.pieces[item] for item in part)]
        labels = torch.cat(
            [labels_at(heldout.records[r], a, b, heads.num_heads, own=True) for r, a, b in wanted]
        ).to(target.device)
        before, after = (s.read(wanted).to(target.device) for s in (original, now))  # [n, H]
        meter.add(labels[:, 0], before, after)
        total.measure(heads, heads(after), labels[:, 1:], draft_head)
    if workers is not None:
        for each in (total, meter):
            each.sums = workers.add_up(each.sums).cpu()
    return total.summary(), meter.result()


def train_medusa2(job: Job) -> None:
    """Train heads alone, then with the target, and write both.

    Raises:
        ValueError: a dtype without gradients, a quantised target, or no room for the new one.

    """
    options, inputs, workers = job.options, job.inputs, job.workers
    if job.dtype == torch.float16:  # a token's share of a step's gradient is about 1e-5 and less
        raise ValueError(
            "the target computes in float16, in which the gradients of a backbone underflow. Train "
            "it with --dtype bfloat16 (or float32); what is stored keeps the target's own dtype."
        )
    if "quantization_config" in inputs.config:
        raise ValueError(
            f"{inputs.source} is stored quantised, and an adapter can't be merged into that without"
            " loss. Train on the unquantised model (--quantization quantises it while it trains)."
        )
    written = all(record.temperature is not None for record in inputs.train)
    joint, steps = complete_joint(options.joint, options.training, self_distilled=written)
    start = None if joint.start_heads is None else fingerprint(joint.start_heads)
    job.settings |= {
        "joint": asdict(joint) | {"start_heads": start, "warmup_steps": steps.warmup_steps},
        "bounds": asdict(joint.bounds),
    }
    with job.open() as run:
        if run.complete:
            return
        target = job.load_target()
        _check_space(job, run, target)
        adapted = lora.attach(target.model, joint.lora, seed=steps.seed)
        run.work.mkdir(exist_ok=True)
        if workers.main:
            for name in (MODEL, DEGRADED):  # of a run that --overwrite throws away
                shutil.rmtree(run.output / name, ignore_errors=True)
        spans = cut_pieces(inputs.heldout, 1 << 31)
        with adapted.disable_adapter():
            heads = _first_heads(job, run, target)
            heldout = job.heldout_texts(target, spans)
        texts = Texts(inputs.train, cut_pieces(inputs.train, 1 << 31, whole=True))
        setup = Setup(texts, heldout, steps, workers, job.bf16)
        method = Medusa2(target, adapted, heads, joint, setup)
        stage = Stage(run)
        loop = Loop(method, stage)
        tokens = sum(method.lengths[item] for items in loop.plan for item in items)
        job.progress.note(
            f"joint stage: {loop.steps} steps, {tokens} tokens; {joint.lm_loss} for the target, "
            f"lambda_0 {joint.heads_weight:g}"
        )
        loop.train(job.report("joint"))
        if workers.main:
            lora.save_adapter(adapted, run.work / "adapter")
            title = f"Medusa-2 on {inputs.source}"
            draw_curves(stage.entries(), run.folder / "curves.png", title)
        trained = {"joint_steps": loop.steps, "joint_tokens": tokens}
        del target, adapted, method, loop
        workers.wait()
        if workers.main:
            if options.machine.quantization is not None or workers.world > 1:
                # what is merged was never quantized, and this process measures all of it
                plain = job.load_target(quantized=False)
                heldout = job.heldout_texts(plain, spans, share=False)
                del plain
            _publish(job, run, heads, heldout, trained)
        workers.wait()


def _first_heads(job: Job, run: TrainingRun, target: Target) -> MedusaHeads:
    """The given heads, or those of the warm-up; new ones where a checkpoint follows."""
    start = job.options.joint.start_heads
    if start is not None:
        heads, _ = load_heads(
            start,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            dtype=torch.float32,
            device=job.workers.device,
        )
        return heads
    if (run.work / "state.pt").exists():
        return job.new_heads(target)
    method = job.heads_alone(target, run)
    Loop(method, Stage(run, "warm-up.jsonl", "warm-up")).train(job.report("warm-up"))
    job.release(method)
    assert isinstance(method.heads, MedusaHeads)
    return method.heads


def _publish(
    job: Job,
    run: TrainingRun,  # with the trained adapter in ``work/adapter``
    heads: MedusaHeads,
    heldout: Texts,
    trained: dict[str, Any],
) -> None:
    """Merge, measure, and write the results; the heads' config.json, written last, completes them.

    The trained model should have been released before: this loads two, one after the other.
    """
    output, work = run.output, run.work
    merged = lora.merge_adapter(job.inputs.source, work / "adapter", work / "merged")
    job.round(heads)
    target = job.load_target(merged, quantized=False)
    heads = heads.to(target.device)
    found: dict[str, Any] = {}
    try:
        accuracy, quality = measure_joint(heads, target, heldout)
        found = {"heldout": accuracy, "quality": quality}
        beyond = shortfalls(quality, job.options.joint.bounds)
    except CacheError as error:  # the new target computes NaN
        beyond = [str(error).removesuffix(".")]
    stored = plain_json(found)
    if stored != found and not beyond:
        beyond = ["not all that was measured is finite"]
    results = {"degraded": bool(beyond), "shortfalls": beyond, **stored}
    base, config = output / (DEGRADED if beyond else MODEL), merged / "config.json"
    new = target_fingerprint(merged)
    write_json(config, {**read_json(config), "medusa_2": results})
    merged.replace(base)
    job.save(heads, {**trained, **results}, new, base)


def plain_json(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checkpoint_layers(model: Any) -> None:
    """Switch gradient checkpointing on, which transformers ties to a layer's training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} can't be checkpointed; leave that option out")
    for layer in layers:
        layer.training = True  # of the layer alone: the dropout in it stays off


def _check_space(job: Job, run: TrainingRun, target: Target) -> None:
    """Refuse to start what the disk can't hold in the end: the merged model."""
    stored = job.inputs.dtype or job.dtype
    wanted = sum(p.numel() for p in target.model.parameters()) * stored.itemsize
    free = free_bytes(run.work)
    if wanted > free:
        raise ValueError(
            f"the new target takes {wanted / 1e9:.1f} GB, and {run.output} has {free / 1e9:.1f} GB "
            "free. Name another disk by --output."
        )
