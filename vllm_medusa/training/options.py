"""What the jobs of training are asked for; recipes take their defaults from here.

Calibration takes the same machine options.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.options import MedusaOptions, PromptFile, PromptJob, SamplingOptions
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
    command_line,
    group,
    option,
    required,
)

BelowOne = Annotated[float, Number(float, 0, 1, below=True)]
WARMUP_STEPS, JOINT_WARMUP_STEPS = 50, 20


class MachineOptions(Options):
    """Where and how transformers runs the target: `train`, `calibrate` and `tree` take these."""

    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", shown="auto")
    dtype: Dtype = option("auto", "the target computes in; auto: its own on GPUs, float32 on CPUs")
    quantization: Literal["4bit", "8bit"] | None = option(None, "of the target, by bitsandbytes")

    def check(self) -> None:
        """See `Options.check`."""
        if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}; use auto, cpu, cuda or such as cuda:1")


class RecordFiles(PromptFile):
    """What is read and written."""

    output: Path = required("records, as JSON lines", "-o")


class TextOptions(SamplingOptions):
    """What the target writes for each prompt."""

    samples: Annotated[int, Number(int, 1, 10_000)] = option(1, "of each prompt", metavar="N")
    max_tokens: Positive = option(512, "of each answer")
    temperature: tuple[AtLeastZero, ...] = option(
        (0.7,),
        "one, or several separated by commas; sample after sample takes the next",
        metavar="T[,T...]",
        joined=",",
    )
    seed: Seed = option(0, "text i uses the seed SEED + i")
    self_talk: bool = option(False, "the target writes the user's later turns too")
    turns: Positive | None = option(
        None, "answers in each --self-talk conversation", metavar="N", shown="3"
    )

    def check(self) -> None:
        """See `Options.check`."""
        if self.turns is not None and not self.self_talk:
            raise ValueError(
                f"--turns {self.turns} is of --self-talk; else the prompts' own turns are answered."
            )
        of_zero = (slot for slot, value in enumerate(self.temperature) if value == 0)
        greedy = sum(len(range(slot, self.samples, len(self.temperature))) for slot in of_zero)
        if greedy > 1:
            shown = ",".join(f"{value:g}" for value in self.temperature)
            raise ValueError(
                f"--samples {self.samples} at temperature {shown} would be {greedy} times the same "
                "text at temperature 0; take fewer samples, or raise --temperature."
            )


class DraftOptions(MedusaOptions):
    """Speculation while the target writes."""

    speculative_model: str | None = option(
        None, "heads; absent: plain vLLM. With heads the texts are the same", metavar="HEADS"
    )

    def check(self) -> None:
        """See `Options.check`."""
        if self.speculative_model is None and (self.tree or self.num_speculative_tokens):
            raise ValueError("--tree and --num-speculative-tokens need heads: --speculative-model.")

    def speculative_config(self) -> dict[str, Any] | None:
        """See `MedusaOptions.speculative_config`."""
        return None if self.speculative_model is None else super().speculative_config()


class DistillOptions(PromptJob):
    """Options of `vllm_medusa.training.distill.distill` and of `vllm-medusa distill`."""

    files: RecordFiles = group(RecordFiles, "files")
    texts: TextOptions = group(TextOptions, "texts")
    medusa: DraftOptions = group(DraftOptions, "Medusa")


class TextFiles(Options):
    """What is trained on, and where the heads go."""

    data: Path = required("texts to train on", "-i")
    output: Path = required("folder for the heads", "-o")
    heldout: Path | None = option(None, "texts to measure on")
    heldout_share: BelowOne = option(
        0.05, "without --heldout: share of the prompts that is held out; 0: none"
    )
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse", "refuse: train nothing while a file has a bad line; skip: leave it out"
    )
    max_text_tokens: Positive | None = option(None, "longer texts are bad lines", metavar="N")
    overwrite: bool = option(False, "throw away the output's run")

    def name(self, *, heldout: bool) -> str:
        """The file whose texts are trained on, or measured on."""
        return str(self.heldout or self.data if heldout else self.data)


class HeadOptions(Options):
    """The heads' shape."""

    num_heads: Positive = option(5)
    num_layers: Positive = option(1, "residual layers a head")
    lm_heads: Literal["shared", "own"] = option(
        "shared", "shared: all heads use the target's LM head; own: each trains a copy of it"
    )
    draft_vocab: Positive | None = option(
        None, "predict only the N most frequent tokens", metavar="N"
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16")


class StepOptions(Options):
    """How the heads are trained."""

    labels: Literal["soft", "tokens"] = option(
        "soft", "soft: the target's distribution over each token; tokens: the text's own"
    )
    decay: Share = option(0.8, "head k weighs DECAY^k")
    epochs: Positive = option(3, "passes over the texts")
    batch_tokens: Positive | None = option(
        None, "tokens a step", metavar="N", shown="256 to 4096: about 1500 steps"
    )
    accumulate: Positive = option(1, "micro-batches a step", metavar="N")
    learning_rate: Above | None = option(
        None, "the heads' peak", shown="1e-3; more for targets narrower than 1280"
    )
    warmup_steps: FromZero | None = option(
        None,
        "at most a tenth",
        metavar="N",
        shown=f"{WARMUP_STEPS}; in medusa-2's joint stage {JOINT_WARMUP_STEPS}",
    )
    weight_decay: AtLeastZero = option(0.0)
    clip: Above = option(1.0, "gradient norm")
    seed: Seed = option(0)
    measure_every: Positive = option(500, "steps", metavar="N")


class TrainMachine(MachineOptions):
    """The same, and what the heads compute in."""

    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "heads compute in; auto: bfloat16 where the hardware is made for it"
    )


class CacheOptions(Options):
    """Where the frozen target's hidden states are kept."""

    cache: Path | None = option(None, "where they are kept (in the output)", metavar="FOLDER")
    cache_gb: AtLeastZero = option(
        50.0,
        "disk limit, of held-out text first; the rest is computed whenever it is needed, a text in "
        "one go, so the order of the steps depends on it",
        metavar="GB",
    )
    cache_dtype: Dtype = option(
        "auto",
        "of the text to train on; auto: what the target computes in, without loss, as held-out "
        "text for medusa-2 always is",
    )
    keep_cache: bool = option(False, "for another run on these texts")

    def check(self) -> None:
        """See `Options.check`."""
        if self.keep_cache and self.cache is None:
            raise ValueError(
                "--keep-cache needs --cache FOLDER: the output's own is only for one run."
            )


class LoraSettings(Options):
    """The adapter's shape. Rank 32 and alpha 16 are the paper's (appendix B.1).

    The paper's dropout of 0.05 makes the student noisy even where it equals the teacher.
    """

    rank: Positive = option(32, "", "--lora-rank")
    alpha: Above = option(16.0, "", "--lora-alpha")
    dropout: BelowOne = option(0.0, "", "--lora-dropout")
    modules: tuple[str, ...] = option(
        (),
        "linear layers such as q_proj",
        "--lora-modules",
        metavar="NAME",
        shown="all but the LM head",
    )


class QualityBounds(Options):
    """How much of its quality a target may lose before the training counts as failed.

    The defaults are a judgement, no law: wide enough for a run that works, too narrow for one that
    diverges or trades quality for heads.
    """

    max_kl: AtLeastZero = option(
        0.05,
        "a token, to the original, on held-out text; beyond it the new target counts as degraded, "
        "says so by its name, and the exit status is 1",
        metavar="NATS",
    )
    max_perplexity_ratio: Annotated[float, Number(float, 1)] = option(
        1.05, "after / before, likewise", metavar="X"
    )


class JointOptions(Options):
    """Medusa-2's joint stage."""

    start_heads: Path | None = option(
        None,
        "trained heads, instead of a warm-up: its options (--epochs, --batch-tokens, "
        "--learning-rate, --accumulate) then do nothing, and the heads' shape is theirs",
        metavar="HEADS",
    )
    lora: LoraSettings = group(LoraSettings)
    lm_loss: Literal["auto", "kl", "cross-entropy"] = option(
        "auto",
        "the target's own: kl to the original model, or cross-entropy of the text; auto: kl if the "
        "target wrote all of it",
    )
    heads_weight: AtLeastZero | None = option(
        None,
        "lambda_0, the heads' loss beside the target's",
        metavar="X",
        shown="0.01 with kl, else 0.2",
    )
    growth: Literal["sine", "linear", "constant"] = option("sine", "how lambda_0 gets there")
    growth_share: Share = option(1.0, "in this share of the steps")
    backbone_rate: Above = option(5e-4, "learning rate's peak")
    heads_rate: Above = option(4.0, "times that, for the heads")
    joint_epochs: Positive = option(1)
    joint_steps: Positive | None = option(None, "at most", metavar="N")
    joint_tokens: Positive = option(8192, "of text a step", metavar="N")
    pass_tokens: Positive = option(
        4096, "of one pass of the target; fewer take less memory", metavar="N"
    )
    checkpoint_layers: bool = option(False, "compute layers twice rather than keep what is in them")
    save: Literal["merged", "adapter"] = option(
        "merged", "merged: a new target in OUTPUT/target; adapter: peft's in OUTPUT/adapter"
    )
    bounds: QualityBounds = group(QualityBounds)


class TrainOptions(Options):
    """Options of `vllm_medusa.training.train.train` and of `vllm-medusa train`."""

    model: str = required("the target: a folder or a hub name", positional=True)
    method: Literal["medusa-1", "medusa-2"] = option("medusa-1")
    files: TextFiles = group(TextFiles, "files")
    heads: HeadOptions = group(HeadOptions, "heads")
    training: StepOptions = group(StepOptions, "training")
    machine: TrainMachine = group(TrainMachine, "machine")
    cache: CacheOptions = group(
        CacheOptions, "medusa-1: the target's hidden states are computed once"
    )
    joint: JointOptions = group(
        JointOptions,
        "medusa-2: after a warm-up of the heads alone, which is medusa-1 by the options above, "
        "heads and a LoRA adapter in the target together. The output holds a new target as well",
    )

    def check(self) -> None:
        """See `Options.check`."""
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
            for name in ("--lm-heads", "--draft-vocab", "--cache", "--cache-dtype"):
                if name in given:
                    raise ValueError(
                        f"{name} is of new heads and their warm-up, and --start-heads brings "
                        "trained ones. Leave one of the two out."
                    )
