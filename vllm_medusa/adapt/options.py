"""What `adapt` is asked for, and what it asks of training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.options import PromptFile, TreeSize
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    Number,
    Options,
    Positive,
    Seed,
    Source,
    group,
    option,
    values_of,
)
from vllm_medusa.training.options import (
    HeadOptions,
    StepOptions,
    TextFiles,
    TrainMachine,
    TrainOptions,
)

# What adapt's own options set in train's, and what else it needs as it has it.
_GIVEN_TO_ADAPT = (
    *("kind", "method", "seed", "dtype", "heldout_share"),
    *("num_heads", "num_layers", "epochs", "learning_rate"),
)
_SET_BY_ADAPT = ("data", "heldout", "output", "overwrite")


class AdaptFiles(PromptFile):
    """What is read and written."""

    output: Path = option("folder for the heads and their report", "-o")


class TextsOptions(Options):
    """What the target writes."""

    samples: Positive = option("of each prompt", default=1)
    max_tokens: Positive = option("of each answer", default=512)
    temperature: AtLeastZero = option("also of the final measure", default=0.7)
    batch: Positive | None = option(
        "prompts at a time", default=None, shown="64, fewer where memory is short"
    )
    heldout_share: Annotated[float, Number(float, 0, 0.5, above=True)] = option(
        "of the prompts; half to calibrate, half to measure",
        default=0.1,
        shown="0.1, at least 8 prompts",
    )


class TrainingOptions(Options):
    """How heads are trained, as far as it is not left to `train`."""

    drafter: Literal["medusa", "hydra", "eagle3"] = option(
        "heads that don't see each other, heads that do, or a drafter with a decoder layer",
        default="medusa",
    )
    method: Literal["medusa-1", "medusa-2"] = option("of medusa", default="medusa-1")
    num_heads: Positive = option(
        "heads; of eagle3 the tokens ahead it is trained for", default=HeadOptions.num_heads
    )
    num_layers: Positive = option("residual layers of each head", default=HeadOptions.num_layers)
    epochs: Positive = option("passes over the texts", default=StepOptions.epochs)
    learning_rate: Above | None = option("the heads' peak", default=None)


class MeasuringOptions(Options):
    """The tree, and how it is measured."""

    num_draft_tokens: TreeSize | None = option(
        "the tree's size; absent: fastest", default=None, metavar="N"
    )
    budgets: tuple[TreeSize, ...] = option(
        "sizes tried, beside automatic trees", default=(4, 16), metavar="N"
    )
    positions: Positive = option(
        "generated tokens to calibrate on, at most about", default=16_384, metavar="N"
    )
    measure_tokens: Positive = option("of an answer", default=128)
    measure_prompts: Positive = option("at most", default=32)
    rounds: Positive = option("of the measurement, at most", default=3)
    measure_seconds: Above = option(
        "about so long: fewer rounds and prompts where they take longer", default=300.0, metavar="S"
    )


class AdaptOptions(Options):
    """Options of `vllm_medusa.adapt.pipeline.adapt` and of `vllm-medusa adapt`."""

    target: Source = option("a folder or a hub name", positional=True)
    files: AdaptFiles = group("files")
    texts: TextsOptions = group("texts (distill)", factory=TextsOptions)
    training: TrainingOptions = group("training (train)", factory=TrainingOptions)
    measuring: MeasuringOptions = group(
        "tree and measuring (tree, compare)", factory=MeasuringOptions
    )
    work: Path | None = option("folder for records, logs...", default=None, shown="OUTPUT.work")
    seed: Seed = option(default=0)
    dtype: Dtype = option("of the target, in all stages", default="auto")
    engine_args: dict[str, Any] = option(
        "more LLM arguments, for distill and compare", default={}, metavar="JSON"
    )

    @property
    def work_folder(self) -> Path:
        """Where stages leave what they make."""
        output = self.files.output
        return self.work or output.parent / f"{output.name}.work"

    def check(self) -> None:
        """Refuse answers that are too short for heads to learn from."""
        least = self.training.num_heads + 2
        lengths = {
            "max-tokens": self.texts.max_tokens,
            "measure-tokens": self.measuring.measure_tokens,
        }
        for name, length in lengths.items():
            if length < least:
                raise ValueError(
                    f"--{name} is {length}; {self.training.num_heads} heads need answers of at "
                    f"least {least} tokens."
                )


def training_of(options: AdaptOptions) -> TrainOptions:
    """What adapt asks of training; files are put in their places when it comes to that."""
    own = options.training
    return TrainOptions(
        model=options.target,
        method=own.method,
        files=TextFiles(data=Path("data"), heldout=Path("heldout"), output=Path("output")),
        heads=HeadOptions(kind=own.drafter, num_heads=own.num_heads, num_layers=own.num_layers),
        training=StepOptions(epochs=own.epochs, learning_rate=own.learning_rate, seed=options.seed),
        machine=TrainMachine(dtype=options.dtype),
    )


def check_training(options: AdaptOptions, training: TrainOptions) -> None:
    """Refuse training that is not adapt's own in what adapt decides.

    Raises:
        ValueError: naming the option.

    """
    own, given = values_of(training_of(options)), values_of(training)
    for name in (*_GIVEN_TO_ADAPT, *_SET_BY_ADAPT):
        if given[name] != own[name]:
            remedy = "give it to adapt itself" if name in _GIVEN_TO_ADAPT else "leave it out"
            if name == "kind":
                name, remedy = "heads", "give --drafter to adapt itself"
            raise ValueError(
                f"--train-args has --{name.replace('_', '-')}, which adapt decides: {remedy}."
            )
