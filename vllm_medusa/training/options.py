"""Options of the training jobs, with their defaults.

Calibration uses the same machine options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    FromZero,
    Model,
    Options,
    Positive,
    Seed,
    Share,
    command_line,
    group,
    option,
)

BelowOne = Annotated[float, Field(ge=0, lt=1)]
WARMUP_STEPS, JOINT_WARMUP_STEPS = 50, 20


class MachineOptions(Options):
    """Device and dtype of the target in transformers: for `train` and `calibrate`."""

    device: str = option(
        "cpu, cuda, cuda:1...; auto: a GPU if available", default="auto", shown="auto"
    )
    dtype: Dtype = option(
        "dtype of the target; auto: its own on GPUs, float32 on CPUs", default="auto"
    )
    quantization: Literal["4bit", "8bit"] | None = option(
        "quantize the target with bitsandbytes", default=None
    )


class TextFiles(Options):
    """Input texts and output folder."""

    data: Path = option("texts to train on", "-i")
    output: Path = option("folder for the heads", "-o")
    heldout: Path | None = option("texts to measure on", default=None)
    heldout_share: BelowOne = option(
        "share of the prompts to hold out, without --heldout; 0: none", default=0.05
    )
    on_bad_line: Literal["refuse", "skip"] = option(
        "bad lines: refuse the file, or skip them", default="refuse"
    )
    overwrite: bool = option("discard an existing run in the output", default=False)

    def name(self, *, heldout: bool) -> str:
        """The file with the texts to train on, or to measure on."""
        return str((heldout and self.heldout) or self.data)


class HeadOptions(Options):
    """The heads' shape."""

    kind: Literal["medusa", "hydra", "eagle3"] = option(
        "medusa: independent heads; hydra: heads that depend on preceding draft tokens; eagle3: "
        "a drafter with a decoder layer, in vLLM's eagle3 format",
        "--drafter",
        default="hydra",
    )
    num_heads: Positive = option("heads; for eagle3, tokens ahead in training", default=5)
    num_layers: Positive = option("residual layers per head", default=1)
    lm_heads: Literal["shared", "own"] | None = option(
        "shared: use the target's LM head; own: each head, or the eagle3 drafter, trains its own "
        "copy",
        default=None,
        shown="shared; for eagle3 own",
    )
    draft_vocab: FromZero | None = option(
        "draft only the N most frequent tokens of the texts; 0: all",
        default=None,
        metavar="N",
        shown="4096 to 16384, as half of the texts need to cover 99% of the others; "
        "all tokens if at most 16384",
    )
    aux_layers: tuple[FromZero, ...] = option(
        "eagle3: three target layers whose inputs it reads",
        default=(),
        metavar="N",
        shown="2, the middle, the third from last",
    )
    start_heads: Path | None = option(
        "trained heads or drafter to continue from, whose shape and draft vocabulary are kept; "
        "for medusa-2, they replace the warm-up",
        default=None,
        metavar="FOLDER",
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = option(
        "dtype of the saved heads", default="bfloat16"
    )

    @property
    def own_lm_heads(self) -> bool:
        """Whether new heads train LM heads of their own."""
        return (self.lm_heads or ("own" if self.kind == "eagle3" else "shared")) == "own"

    def check(self) -> None:
        """See `Options.check`."""
        if self.start_heads is None:
            return
        for name in ("--lm-heads", "--draft-vocab"):
            if name in command_line(self):
                raise ValueError(
                    f"{name} is for new heads, but --start-heads {self.start_heads} has its own. "
                    "Omit one of the two."
                )


class StepOptions(Options):
    """How the heads are trained."""

    labels: Literal["soft", "tokens"] = option(
        "soft: the target's distribution; tokens: the tokens of the text", default="soft"
    )
    decay: Share = option("head k has loss weight DECAY^k", default=0.8)
    epochs: Positive = option("passes over the texts", default=3)
    batch_tokens: Positive | None = option(
        "tokens per step", default=None, metavar="N", shown="256 to 4096: about 1500 steps"
    )
    learning_rate: Above | None = option(
        "heads' peak learning rate", default=None, shown="1e-3; more for targets narrower than 573"
    )
    warmup_steps: FromZero | None = option(
        "steps of learning-rate warm-up, at most a tenth of all steps",
        default=None,
        metavar="N",
        shown=f"{WARMUP_STEPS}; in medusa-2's joint stage {JOINT_WARMUP_STEPS}",
    )
    weight_decay: AtLeastZero = option("AdamW's weight decay", default=0.0)
    clip: Above = option("max gradient norm", default=1.0)
    seed: Seed = option("seed of initial weights and the order of texts", default=0)
    measure_every: Positive = option("steps between measurements", default=500, metavar="N")


class TrainMachine(MachineOptions):
    """Machine options, and the heads' precision."""

    precision: Literal["auto", "float32", "bfloat16"] = option(
        "compute precision of the heads; auto: bfloat16 if native", default="auto"
    )


class CacheOptions(Options):
    """Storage of the frozen target's hidden states."""

    cache: Path | None = option(
        "folder for hidden states, reusable by other runs on these texts; default: in the output "
        "until training ends",
        default=None,
        metavar="FOLDER",
    )
    cache_gb: AtLeastZero = option(
        "disk limit; the rest is computed when needed, for all pieces of a text together, so "
        "the order of steps depends on this",
        default=50.0,
        metavar="GB",
    )


class JointOptions(Options):
    """Medusa-2's joint stage.

    The adapter's rank 32 and alpha 16 are the paper's (appendix B.1). Its dropout is omitted: it
    would add noise to the student even where it equals the teacher. The bounds on quality are
    heuristic: normal runs stay within them, diverged runs do not.
    """

    lora_rank: Positive = option("rank of the target's adapter", default=32)
    lora_alpha: Above = option("the adapter's scale times its rank", default=16.0)
    lm_loss: Literal["auto", "kl", "cross-entropy"] = option(
        "target's loss: kl to the original model, or cross-entropy of the text; auto: kl if the "
        "target generated all of it",
        default="auto",
    )
    heads_weight: AtLeastZero | None = option(
        "lambda_0, weight of the heads' loss",
        default=None,
        metavar="X",
        shown="0.01 with kl, else 0.2",
    )
    backbone_rate: Above = option("peak learning rate of the adapter", default=5e-4)
    heads_rate: Above = option("heads' learning rate, as a multiple of the adapter's", default=4.0)
    joint_epochs: Positive = option("passes over the texts", default=1)
    joint_tokens: Positive = option("tokens per step", default=8192, metavar="N")
    pass_tokens: Positive = option(
        "tokens per pass of the target; fewer need less memory", default=4096, metavar="N"
    )
    checkpoint_layers: bool = option(
        "gradient checkpointing: recompute layers to save memory", default=False
    )
    max_kl: AtLeastZero = option(
        "max KL per token to the original on held-out text; beyond it, the new target is saved as "
        "degraded, and the exit status is 1",
        default=0.05,
        metavar="NATS",
    )
    max_perplexity_ratio: Annotated[float, Field(ge=1)] = option(
        "max perplexity ratio after / before, likewise", default=1.05, metavar="X"
    )


class TrainOptions(Options):
    """Options of `vllm_medusa.training.train.train` and of `vllm-medusa train`."""

    model: Model = option("the target: a folder or a hub name", positional=True)
    method: Literal["medusa-1", "medusa-2"] = option(
        "medusa-1: the target stays as it is; medusa-2: it is trained with Medusa heads",
        default="medusa-1",
    )
    files: TextFiles = group("files")
    heads: HeadOptions = group("heads", factory=HeadOptions)
    training: StepOptions = group("training", factory=StepOptions)
    machine: TrainMachine = group("machine", factory=TrainMachine)
    cache: CacheOptions = group(
        "medusa-1: the target's hidden states are computed once", factory=CacheOptions
    )
    joint: JointOptions = group(
        "medusa-2: after a warm-up of only the heads (medusa-1 with the options above), "
        "heads and a LoRA adapter of the target are trained together; also writes a new target",
        factory=JointOptions,
    )

    def check(self) -> None:
        """See `Options.check`."""
        heads, kind = self.heads, self.heads.kind
        if kind != "medusa" and self.method != "medusa-1":
            raise ValueError(
                f"--method {self.method} trains the target with Medusa heads, not with {kind}. Add "
                "--drafter medusa, or omit the method."
            )
        if kind == "eagle3" and heads.num_layers != 1:
            raise ValueError(
                f"--num-layers {heads.num_layers} is for Medusa and Hydra heads: EAGLE-3 has one "
                "decoder layer. Omit it."
            )
        if heads.aux_layers and kind != "eagle3":
            raise ValueError(
                f"--aux-layers {' '.join(map(str, heads.aux_layers))} is for EAGLE-3, not for "
                f"{kind}. Add --drafter eagle3, or omit the option."
            )
        if self.method == "medusa-1":
            if joint := command_line(self.joint):
                raise ValueError(
                    f"{joint[0]} is an option of --method medusa-2; the method is medusa-1. Add "
                    "--method medusa-2 --drafter medusa, or omit the option."
                )
            return
        if self.files.heldout is None and not self.files.heldout_share:
            raise ValueError(
                "medusa-2 changes the target, so its quality must be measured: pass --heldout "
                "FILE, or a --heldout-share above 0."
            )
        if self.heads.start_heads is not None and self.cache.cache is not None:
            raise ValueError(
                "--cache is for the warm-up of medusa-2, which --start-heads replaces. Omit one of "
                "the two."
            )
