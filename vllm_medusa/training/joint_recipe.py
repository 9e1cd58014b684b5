"""How Medusa-2's joint stage is run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_medusa.training.lora import LoraSettings
from vllm_medusa.training.medusa2_schedule import HEADS_RATE, HeadsWeight
from vllm_medusa.training.optimisation import Optimisation

LM_LOSSES = ("kl", "cross-entropy")


@dataclass(frozen=True)
class JointRecipe:
    """How the joint stage is run; the paper's numbers are those of its appendix B.

    Attributes:
        lora: the adapter.
        heads_weight: lambda_0 over the steps.
        heads_rate: the heads' learning rate over the backbone's.
        lm_loss: "kl" against the original model (text it wrote), or "cross-entropy" of the text.
        labels: of the heads: "tokens", or "soft", the original model's distributions.
        decay: lambda_k = decay^k.
        epochs: passes over the text.
        steps: at most so many steps; None: as many as the text has.
        step_tokens: text tokens a step, prompts included, over all processes.
        pass_tokens: tokens of one pass of the backbone, padding included; fewer take less memory.
        checkpointing: keep only the layers' inputs and compute the rest twice.
        bf16: autocast to bfloat16; what trains stays fp32.
        optimisation: of the backbone; its learning rate is the backbone's.
        seed: of the order of the text, the adapter's start and its dropout.
        measure_every: steps between two measurements on held-out text.
        measured_rows: at most about so many held-out positions are measured.

    """

    lora: LoraSettings = field(default_factory=LoraSettings)
    heads_weight: HeadsWeight = field(default_factory=HeadsWeight)
    heads_rate: float = HEADS_RATE
    lm_loss: str = "kl"
    labels: str = "soft"
    decay: float = 0.8
    epochs: int = 1
    steps: int | None = None
    step_tokens: int = 8192
    pass_tokens: int = 4096
    checkpointing: bool = False
    bf16: bool = False
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(learning_rate=5e-4, warmup_steps=20)
    )
    seed: int = 0
    measure_every: int = 200
    measured_rows: int = 16384

    def __post_init__(self) -> None:
        if self.lm_loss not in LM_LOSSES:
            raise ValueError(f"lm_loss {self.lm_loss!r}; use one of {', '.join(LM_LOSSES)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)
