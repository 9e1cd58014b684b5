"""How heads are trained: alone (Medusa-1), and jointly with an adapter in the target (Medusa-2).

Defaults are those of the options. What a user may leave open follows from the target and the texts.

lambda_0, the heads' weight beside the target's own loss, grows to its peak, because what untrained
heads ask of the backbone would spoil it (Medusa, https://arxiv.org/abs/2401.10774, section 2.2.2).
The paper's recipes (appendix B): on text of others a peak of 0.2 after heads trained alone
(Vicuna 7B and 13B), on self-distilled text a peak of 0.01 that grows as a sine until the last step
(Vicuna 33B, Zephyr). The reference trainer's "sine", "linear" and "constant" are these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vllm_medusa.training.optimisation import Optimisation
from vllm_medusa.training.options import (
    JOINT_WARMUP_STEPS,
    WARMUP_STEPS,
    JointOptions,
    LoraSettings,
    StepOptions,
)

PEAK_SELF_DISTILLED = 0.01  # appendix B.3
PEAK_OTHER = 0.2  # appendix B.2


@dataclass(frozen=True)
class Recipe:
    """How heads are trained, their shape aside."""

    labels: str = StepOptions.labels
    decay: float = StepOptions.decay
    epochs: int = StepOptions.epochs
    batch_rows: int = 1024  # positions a step, of all processes and micro-batches together
    accumulate: int = StepOptions.accumulate  # micro-batches a step and process
    bf16: bool = False  # compute in bfloat16 where autocast allows; weights and sums stay fp32
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: int = StepOptions.seed  # of the order of the text
    measure_every: int = StepOptions.measure_every
    measured_rows: int = 16384  # at most so many held-out positions are measured

    @classmethod
    def of(
        cls,
        options: StepOptions,
        *,
        bf16: bool,
        hidden_size: int,
        num_labels: int,
        drafter: bool = False,
    ) -> Recipe:
        """Fill in what isn't given, for a target's width and the labels of head 0 in the texts.

        ``drafter``: an EAGLE-3 drafter is trained, in place of heads.
        """
        rate = (usual_drafter_rate if drafter else usual_rate)(hidden_size)
        return cls(
            **_shared(options),
            epochs=options.epochs,
            batch_rows=options.batch_tokens or usual_batch(num_labels * options.epochs),
            accumulate=options.accumulate,
            bf16=bf16,
            optimisation=_optimisation(options, options.learning_rate or rate, WARMUP_STEPS),
        )


def usual_rate(hidden_size: int) -> float:
    """Peak learning rate where none is given: 1e-3, and more for narrow targets, up to 5e-3.

    AdamW moves each weight by about the rate, so a layer's output by about rate times width, and
    the logits by that times width again. 1e-3 is the reference recipe's, for a width of 4096; at
    the test target's 256, 5e-3 learns far more in the same steps; at SmolLM2's 576 Hydra heads
    learned at 7e-4 (loss of head 0 after 225 steps 3.6, pieces of 32 positions) and at 5e-4
    (4.9 after 175, pieces of 128), not at 2.2e-3 (7.3 after 200, pieces of 128).
    """
    return min(5e-3, max(1e-3, 5e-3 * (256 / hidden_size) ** 2))


def usual_drafter_rate(hidden_size: int) -> float:
    """The same for EAGLE-3, a whole decoder layer: 1e-4 for a width of 4096, up to 2e-3."""
    return min(2e-3, max(1e-4, 0.512 / hidden_size))


def usual_batch(rows: int) -> int:
    """Positions a step where none is given, of ``rows`` in all epochs: about 1500 steps.

    At least 256, at most 4096, in steps of 128.
    """
    return min(4096, max(256, rows // 1500 // 128 * 128))


@dataclass(frozen=True)
class HeadsWeight:
    """lambda_0 over the joint steps."""

    peak: float = PEAK_SELF_DISTILLED
    growth: str = JointOptions.growth  # "sine", "linear" or "constant"
    share: float = JointOptions.growth_share  # of the steps in which it grows

    def at(self, step: int, steps: int) -> float:
        """lambda_0 of the 0-based ``step`` of ``steps``: above 0 at the first, the peak at last."""
        if self.growth == "constant":
            return self.peak
        done = min(1.0, (step + 1) / (steps * self.share))
        return self.peak * (math.sin(done * math.pi / 2) if self.growth == "sine" else done)


@dataclass(frozen=True)
class JointRecipe:
    """How the joint stage is run; the paper's numbers are those of its appendix B."""

    lora: LoraSettings = field(default_factory=LoraSettings)  # type: ignore[arg-type]
    heads_weight: HeadsWeight = field(default_factory=HeadsWeight)
    heads_rate: float = JointOptions.heads_rate  # over the backbone's learning rate
    lm_loss: str = "kl"  # against the original model, or "cross-entropy" of the text
    labels: str = StepOptions.labels
    decay: float = StepOptions.decay
    epochs: int = JointOptions.joint_epochs
    steps: int | None = JointOptions.joint_steps  # at most so many; None: as the text has
    step_tokens: int = JointOptions.joint_tokens  # prompts included, over all processes
    pass_tokens: int = JointOptions.pass_tokens  # padding included
    checkpointing: bool = JointOptions.checkpoint_layers
    bf16: bool = False  # autocast; what trains stays fp32
    optimisation: Optimisation = field(  # of the backbone
        default_factory=lambda: Optimisation(JointOptions.backbone_rate, JOINT_WARMUP_STEPS)
    )
    seed: int = StepOptions.seed  # of the order of the text, the adapter's start and its dropout
    measure_every: int = StepOptions.measure_every
    measured_rows: int = 16384  # at most about so many held-out positions are measured

    @classmethod
    def of(
        cls, options: JointOptions, steps: StepOptions, *, bf16: bool, self_distilled: bool
    ) -> JointRecipe:
        """Fill in what isn't given; ``self_distilled``: the target wrote all of the text."""
        lm_loss: str = options.lm_loss
        if lm_loss == "auto":
            lm_loss = "kl" if self_distilled else "cross-entropy"
        peak = options.heads_weight
        if peak is None:
            peak = PEAK_SELF_DISTILLED if lm_loss == "kl" else PEAK_OTHER
        return cls(
            lora=options.lora,
            heads_weight=HeadsWeight(peak, options.growth, options.growth_share),
            heads_rate=options.heads_rate,
            lm_loss=lm_loss,
            **_shared(steps),
            epochs=options.joint_epochs,
            steps=options.joint_steps,
            step_tokens=options.joint_tokens,
            pass_tokens=options.pass_tokens,
            checkpointing=options.checkpoint_layers,
            bf16=bf16,
            optimisation=_optimisation(steps, options.backbone_rate, JOINT_WARMUP_STEPS),
        )


def _shared(options: StepOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("labels", "decay", "seed", "measure_every")}


def _optimisation(options: StepOptions, rate: float, warmup: int) -> Optimisation:
    given = options.warmup_steps
    return Optimisation(
        learning_rate=rate,
        warmup_steps=warmup if given is None else given,
        weight_decay=options.weight_decay,
        clip=options.clip,
    )
