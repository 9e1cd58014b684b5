"""Defaults that depend on the target and the texts, and the heads' weight in Medusa-2.

lambda_0, the weight of the heads' loss, grows to its peak, because the gradients of untrained
heads would damage the backbone (Medusa, https://arxiv.org/abs/2401.10774, section 2.2.2).
The paper's recipes (appendix B): a peak of 0.2 on other text, 0.01 on self-distilled text, with
sine growth until the last step.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_medusa.training.options import (
    JOINT_WARMUP_STEPS,
    WARMUP_STEPS,
    JointOptions,
    StepOptions,
)

PEAK_SELF_DISTILLED = 0.01  # appendix B.3
PEAK_OTHER = 0.2  # appendix B.2
MEASURED_ROWS = 16384  # approximate max number of held-out positions to measure


def complete(
    options: StepOptions, *, hidden_size: int, num_labels: int, drafter: bool = False
) -> StepOptions:
    """Fill in missing options, for a target's width and the number of head 0's labels in the texts.

    ``drafter``: an EAGLE-3 drafter is trained instead of heads.
    """
    # a drafter is a whole decoder layer: 1e-4 for a width of 4096
    rate = min(2e-3, max(1e-4, 0.512 / hidden_size)) if drafter else default_rate(hidden_size)
    return replace(
        options,
        batch_tokens=options.batch_tokens or default_batch(num_labels * options.epochs),
        learning_rate=options.learning_rate or rate,
        warmup_steps=WARMUP_STEPS if options.warmup_steps is None else options.warmup_steps,
    )


def complete_joint(
    joint: JointOptions, options: StepOptions, *, self_distilled: bool
) -> tuple[JointOptions, StepOptions]:
    """The same for Medusa-2's joint stage; ``self_distilled``: the target generated all text."""
    lm_loss = joint.lm_loss
    if lm_loss == "auto":
        lm_loss = "kl" if self_distilled else "cross-entropy"
    peak = joint.heads_weight
    if peak is None:
        peak = PEAK_SELF_DISTILLED if lm_loss == "kl" else PEAK_OTHER
    warmup = JOINT_WARMUP_STEPS if options.warmup_steps is None else options.warmup_steps
    steps = replace(
        options,
        epochs=joint.joint_epochs,
        batch_tokens=joint.joint_tokens,
        learning_rate=joint.backbone_rate,
        warmup_steps=warmup,
    )
    return replace(joint, lm_loss=lm_loss, heads_weight=peak), steps


def default_rate(hidden_size: int) -> float:
    """Default peak learning rate: 1e-3, and more for narrow targets, up to 5e-3.

    AdamW changes each weight by about the rate, hence a layer's output by about rate times width,
    and the logits by that times width again. 1e-3 is the reference recipe's rate, for a width of
    4096. At the test target's width of 256, 5e-3 learns far more in the same number of steps. At
    SmolLM2's width of 576, Hydra heads learned at 7e-4 (loss of head 0: 3.6 after 225 steps, pieces
    of 32 positions) and at 5e-4 (4.9 after 175, pieces of 128), but not at 2.2e-3 (7.3 after 200,
    pieces of 128).
    """
    return min(5e-3, max(1e-3, 5e-3 * (256 / hidden_size) ** 2))


def default_batch(rows: int) -> int:
    """Default positions per step, for ``rows`` over all epochs: about 1500 steps.

    At least 256, at most 4096, in steps of 128.
    """
    return min(4096, max(256, rows // 1500 // 128 * 128))


def heads_weight(options: JointOptions, step: int, steps: int) -> float:
    """lambda_0 at the 0-based ``step``: above 0 at the first, the peak at the last."""
    return (options.heads_weight or 0.0) * math.sin((step + 1) / steps * math.pi / 2)
