"""What the jobs of training are asked for; recipes take their defaults from here.

Calibration takes the same machine options.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    FromZero,
    Number,
    Options,
    Positive,
    Seed,
    Share,
    Source,
    command_line,
    group,
    option,
)

BelowOne = Annotated[float, Number(float, 0, 1, below=True)]
WARMUP_STEPS, JOINT_WARMUP_STEPS = 50, 20


class MachineOptions(Options):
    """Where and how transformers runs the target: `train`, `calibrate` and `tree` take these."""

    device: str = option(
        "cpu, cuda, cuda:1; auto: a GPU if there is one", default="auto", shown="auto"
    )
    dtype: Dtype = option(
        "the target computes in; auto: its own on GPUs, float32 on CPUs", default="auto"
    )
    quantization: Literal["4bit", "8bit"] | None = option(
        "of the target, by bitsandbytes", default=None
    )

    def check(self) -> None:
        """See `Options.check`."""
        if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}; use auto, cpu, cuda or such as cuda:1")


class TextFiles(Options):
    """What is trained on, and where the heads go."""

    data: Path = option("texts to train on", "-i")
    output: Path = option("folder for the heads", "-o")
    heldout: Path | None = option("texts to measure on", default=None)
    heldout_share: BelowOne = option(
        "without --heldout: share of the prompts that is held out; 0: none", default=0.05
    )
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse: train nothing while a file has a bad line; skip: leave it out", default="refuse"
    )
    overwrite: bool = option("throw away the output's run", default=False)

    def name(self, *, heldout: bool) -> str:
        """The file whose texts are trained on, or measured on."""
        return str(self.heldout or self.data if heldout else self.data)


class HeadOptions(Options):
    """The heads' shape."""

    kind: Literal["medusa", "hydra", "eagle3"] = option(
        "medusa: heads don't see each other; hydra: each sees the tokens before its own; eagle3: a "
        "drafter with a decoder layer, as vLLM's eagle3 loads it",
        "--heads",
        default="medusa",
    )
    num_heads: Positive = option("of eagle3: tokens ahead that it is trained for", default=5)
    num_layers: Positive = option("residual layers a head", default=1)
    lm_heads: Literal["shared", "own"] | None = option(
        "shared: the target's LM head, as it is; own: each head, or the eagle3 drafter, trains a "
        "copy of it",
        default=None,
        shown="shared; of eagle3 own",
    )
    draft_vocab: FromZero | None = option(
        "predict only the N tokens that the texts have most; 0: all",
        default=None,
        metavar="N",
        shown="4096 to 16384, with 99% of the texts; all of no more than 16384",
    )
    aux_layers: tuple[FromZero, ...] = option(
        "of eagle3: three of the target's layers, whose inputs it reads",
        default=(),
        metavar="N",
        shown="2, the middle, the last but two",
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = option(default="bfloat16")


class StepOptions(Options):
    """How the heads are trained."""

    labels: Literal["soft", "tokens"] = option(
        "soft: the target's distribution over each token; tokens: the text's own", default="soft"
    )
    decay: Share = option("head k weighs DECAY^k", default=0.8)
    epochs: Positive = option("passes over the texts", default=3)
    batch_tokens: Positive | None = option(
        "tokens per step", default=None, metavar="N", shown="256 to 4096: about 1500 steps"
    )
    learning_rate: Above | None = option(
        "the heads' peak", default=None, shown="1e-3; more for targets narrower than 573"
    )
    warmup_steps: FromZero | None = option(
        "at most a tenth",
        default=None,
        metavar="N",
        shown=f"{WARMUP_STEPS}; in medusa-2's joint stage {JOINT_WARMUP_STEPS}",
    )
    weight_decay: AtLeastZero = option(default=0.0)
    clip: Above = option("gradient norm", default=1.0)
    seed: Seed = option(default=0)
    measure_every: Positive = option("steps", default=500, metavar="N")


class TrainMachine(MachineOptions):
    """The same, and what the heads compute in."""

    precision: Literal["auto", "float32", "bfloat16"] = option(
        "heads compute in; auto: bfloat16 where the hardware is made for it", default="auto"
    )


class CacheOptions(Options):
    """Where the frozen target's hidden states are kept."""

    cache: Path | None = option(
        "where they are kept, for other runs on these texts too; absent: in the output until the "
        "heads are trained",
        default=None,
        metavar="FOLDER",
    )
    cache_gb: AtLeastZero = option(
        "disk limit; the rest is computed whenever it is needed, all pieces of a text together, so "
        "the order of the steps depends on it",
        default=50.0,
        metavar="GB",
    )


class LoraSettings(Options):
    """The adapter's shape; rank 32 and alpha 16 are the paper's (appendix B.1).

    The paper's dropout is left out: the student is noisy even where it equals the teacher.
    """

    rank: Positive = option("", "--lora-rank", default=32)
    alpha: Above = option("", "--lora-alpha", default=16.0)
    modules: tuple[str, ...] = option(
        "linear layers such as q_proj",
        "--lora-modules",
        default=(),
        metavar="NAME",
        shown="all but the LM head",
    )


class QualityBounds(Options):
    """How much of its quality a target may lose before the training counts as failed.

    The defaults are heuristic: wide enough for a run that works, too narrow for one that diverges.
    """

    max_kl: AtLeastZero = option(
        "a token, to the original, on held-out text; beyond it the new target counts as degraded, "
        "says so by its name, and the exit status is 1",
        default=0.05,
        metavar="NATS",
    )
    max_perplexity_ratio: Annotated[float, Number(float, 1)] = option(
        "after / before, likewise", default=1.05, metavar="X"
    )


class JointOptions(Options):
    """Medusa-2's joint stage."""

    start_heads: Path | None = option(
        "trained heads, instead of a warm-up: its options (--epochs, --batch-tokens, "
        "--learning-rate) then do nothing, and the heads' shape is theirs",
        default=None,
        metavar="HEADS",
    )
    lora: LoraSettings = group(factory=LoraSettings)
    lm_loss: Literal["auto", "kl", "cross-entropy"] = option(
        "the target's own: kl to the original model, or cross-entropy of the text; auto: kl if the "
        "target wrote all of it",
        default="auto",
    )
    heads_weight: AtLeastZero | None = option(
        "lambda_0, the heads' loss beside the target's",
        default=None,
        metavar="X",
        shown="0.01 with kl, else 0.2",
    )
    backbone_rate: Above = option("learning rate's peak", default=5e-4)
    heads_rate: Above = option("times that, for the heads", default=4.0)
    joint_epochs: Positive = option(default=1)
    joint_tokens: Positive = option("of text per step", default=8192, metavar="N")
    pass_tokens: Positive = option(
        "of one pass of the target; fewer take less memory", default=4096, metavar="N"
    )
    checkpoint_layers: bool = option(
        "compute layers twice rather than keep what is in them", default=False
    )
    bounds: QualityBounds = group(factory=QualityBounds)


class TrainOptions(Options):
    """Options of `vllm_medusa.training.train.train` and of `vllm-medusa train`."""

    model: Source = option("the target: a folder or a hub name", positional=True)
    method: Literal["medusa-1", "medusa-2"] = option(default="medusa-1")
    files: TextFiles = group("files")
    heads: HeadOptions = group("heads", factory=HeadOptions)
    training: StepOptions = group("training", factory=StepOptions)
    machine: TrainMachine = group("machine", factory=TrainMachine)
    cache: CacheOptions = group(
        "medusa-1: the target's hidden states are computed once", factory=CacheOptions
    )
    joint: JointOptions = group(
        "medusa-2: after a warm-up of the heads alone, which is medusa-1 by the options above, "
        "heads and a LoRA adapter in the target together. The output holds a new target as well",
        factory=JointOptions,
    )

    def check(self) -> None:
        """See `Options.check`."""
        heads, kind = self.heads, self.heads.kind
        if kind != "medusa" and self.method != "medusa-1":
            raise ValueError(
                f"--heads {kind} leaves the target as it is; the method is {self.method}. Leave it "
                "out, or train Medusa heads with it."
            )
        if kind == "eagle3" and heads.num_layers != 1:
            raise ValueError(
                f"--num-layers {heads.num_layers} is for Medusa and Hydra heads: EAGLE-3 has one "
                "decoder layer. Leave it out."
            )
        if heads.aux_layers and kind != "eagle3":
            raise ValueError(
                f"--aux-layers is an option of --heads eagle3; the heads are {kind}. Leave it out."
            )
        if self.method == "medusa-1":
            if joint := command_line(self.joint):
                raise ValueError(
                    f"{joint[0]} is an option of --method medusa-2; the method is medusa-1. Choose "
                    "that method, or leave the option out."
                )
            return
        if self.files.heldout is None and not self.files.heldout_share:
            raise ValueError(
                "medusa-2 changes the target, so its quality has to be measured: give --heldout "
                "FILE, or a --heldout-share above 0."
            )
        if self.joint.start_heads is not None:
            given = [*command_line(self.heads), *command_line(self.cache)]
            for name in ("--lm-heads", "--draft-vocab", "--cache"):
                if name in given:
                    raise ValueError(
                        f"{name} is of new heads and their warm-up, and --start-heads brings "
                        "trained ones. Leave one of the two out."
                    )
