"""Options of `adapt`, and those that it passes to training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from vllm_medusa.offline.options import EngineOptions, PromptFile, TreeSize
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Number,
    Positive,
    Seed,
    Source,
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

# Options of train that follow from adapt's own, or that adapt fills in.
_DECIDED = (
    *("kind", "method", "seed", "dtype", "heldout_share", "num_heads", "epochs"),
    *("data", "heldout", "output", "overwrite"),
)
_MIN_VOCABULARY = 16  # tokens; the guesses of a head are about as many


class AdaptOptions(EngineOptions, PromptFile):
    """Options of `vllm_medusa.adapt.pipeline.adapt` and of `vllm-medusa adapt`."""

    target: Source = option("a folder or a hub name", positional=True)
    output: Path = option("folder for the heads and their report", "-o")
    work: Path | None = option("folder for records, logs...", default=None, shown="OUTPUT.work")
    seed: Seed = option(default=0)
    batch: Positive | None = option(  # type: ignore[assignment]
        "prompts at a time", default=None, shown="64, fewer where memory is short"
    )
    samples: Positive = option("texts of each prompt", default=1)
    max_tokens: Positive = option("of each answer", default=512)
    temperature: AtLeastZero = option("also of the final measurement", default=0.7)
    heldout_share: Annotated[float, Number(float, 0, 0.5, above=True)] = option(
        "of the prompts; half to calibrate, half to measure",
        default=0.1,
        shown="0.1, at least 8 prompts",
    )
    drafter: Literal["medusa", "hydra", "eagle3"] = option(
        "independent heads, sequentially dependent heads, or a drafter with a decoder layer",
        default="medusa",
    )
    method: Literal["medusa-1", "medusa-2"] = option("of medusa", default="medusa-1")
    num_heads: Positive = option(
        "heads; of eagle3 the tokens ahead it is trained for", default=HeadOptions.num_heads
    )
    epochs: Positive = option("passes over the texts", default=StepOptions.epochs)
    train_args: str = option(
        "more of train's options, as in --train-args='--learning-rate 1e-3'",
        default="",
        metavar="TEXT",
    )
    budgets: tuple[TreeSize, ...] = option(
        "draft nodes of the trees to measure; heads keep the fastest", default=(4, 16), metavar="N"
    )
    measure_tokens: Positive = option("of an answer, in the final measurement", default=128)
    measure_seconds: Above = option(
        "approximate time limit: rounds and prompts are reduced to fit", default=300.0, metavar="S"
    )

    @property
    def work_folder(self) -> Path:
        """The folder of the stages' results."""
        return self.work or self.output.parent / f"{self.output.name}.work"

    def check(self) -> None:
        """See `Options.check`."""
        needed = self.num_heads + 2
        if min(self.max_tokens, self.measure_tokens) < needed:
            raise ValueError(
                f"--max-tokens is {self.max_tokens} and --measure-tokens {self.measure_tokens}; "
                f"{self.num_heads} heads need answers of at least {needed} tokens."
            )


def training_of(options: AdaptOptions) -> TrainOptions:
    """Training options of adapt; the stage sets the files."""
    return TrainOptions(
        model=options.target,
        method=options.method,
        files=TextFiles(data=Path("data"), heldout=Path("heldout"), output=Path("output")),
        heads=HeadOptions(kind=options.drafter, num_heads=options.num_heads),
        training=StepOptions(epochs=options.epochs, seed=options.seed),
        machine=TrainMachine(dtype=options.dtype),
    )


def check_training(options: AdaptOptions, training: TrainOptions) -> None:
    """Refuse training options that adapt sets itself.

    Raises ValueError: naming the option.
    """
    own, given = values_of(training_of(options)), values_of(training)
    if changed := next((name for name in _DECIDED if given[name] != own[name]), None):
        name = "heads" if changed == "kind" else changed.replace("_", "-")
        raise ValueError(
            f"--train-args has --{name}, which adapt decides: give it to adapt itself (--heads as "
            "--drafter), or leave it out."
        )
    if 0 < (size := given["draft_vocab"] or 0) < _MIN_VOCABULARY:
        raise ValueError(
            f"--train-args has --draft-vocab {size}; a drafter that knows fewer than "
            f"{_MIN_VOCABULARY} tokens drafts nothing. Give thousands, or 0 for all tokens."
        )
