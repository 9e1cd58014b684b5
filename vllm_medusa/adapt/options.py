"""What `adapt` is asked for, and what it asks of training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.options import CompareOptions, PromptFile
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    Number,
    Options,
    Positive,
    Seed,
    group,
    option,
    required,
    values_of,
)
from vllm_medusa.training.options import (
    HeadOptions,
    StepOptions,
    TextFiles,
    TrainMachine,
    TrainOptions,
)
from vllm_medusa.tree.topology import MAX_NODES

# What adapt's own options set in train's, and what else it needs as it has it.
_GIVEN_TO_ADAPT = (
    *("method", "seed", "dtype", "heldout_share"),
    *("num_heads", "num_layers", "epochs", "learning_rate"),
)
_SET_BY_ADAPT = ("data", "heldout", "output", "overwrite", "save")

TreeSize = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # draft nodes


class AdaptFiles(PromptFile):
    """What is read and written."""

    output: Path = required("folder for the heads and their report", "-o")


class TextsOptions(Options):
    """What the target writes."""

    samples: Positive = option(1, "of each prompt")
    max_tokens: Positive = option(512, "of each answer")
    temperature: AtLeastZero = option(0.7, "also of the final measure")
    batch: Positive | None = option(None, "prompts at a time")
    heldout_share: Annotated[float, Number(float, 0, 0.5, above=True)] = option(
        0.1,
        "of the prompts; half to calibrate, half to measure",
        shown="0.1, at least 8 prompts",
    )


class TrainingOptions(Options):
    """How heads are trained, as far as it is not left to `train`."""

    method: Literal["medusa-1", "medusa-2"] = option("medusa-1")
    num_heads: Positive = option(HeadOptions.num_heads, "heads")
    num_layers: Positive = option(HeadOptions.num_layers, "residual layers of each head")
    epochs: Positive = option(StepOptions.epochs, "passes over the texts")
    learning_rate: Above | None = option(None, "the heads' peak")


class MeasuringOptions(Options):
    """The tree, and how it is measured."""

    num_draft_tokens: TreeSize | None = option(
        None, "the tree's size; absent: fastest", metavar="N"
    )
    budgets: tuple[TreeSize, ...] = option(CompareOptions.budgets, "sizes tried", metavar="N")
    measure_tokens: Positive = option(128, "of an answer")
    measure_prompts: Positive = option(32, "at most")
    rounds: Positive = option(3, "of the measurement")


class AdaptOptions(Options):
    """Options of `vllm_medusa.adapt.pipeline.adapt` and of `vllm-medusa adapt`."""

    target: str = required("a folder or a hub name", positional=True)
    files: AdaptFiles = group(AdaptFiles, "files")
    texts: TextsOptions = group(TextsOptions, "texts (distill)")
    training: TrainingOptions = group(TrainingOptions, "training (train)")
    measuring: MeasuringOptions = group(MeasuringOptions, "tree and measuring (tree, compare)")
    work: Path | None = option(None, "folder for records, logs...", shown="OUTPUT.work")
    seed: Seed = option(0)
    dtype: Dtype = option("auto", "of the target, in all stages")
    engine_args: dict[str, Any] = option(
        {}, "more LLM arguments, for distill and compare", metavar="JSON"
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
        heads=HeadOptions(num_heads=own.num_heads, num_layers=own.num_layers),
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
            raise ValueError(
                f"--train-args has --{name.replace('_', '-')}, which adapt decides: {remedy}."
            )
