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
    *("kind", "method", "seed", "dtype", "heldout_share", "num_heads", "num_layers", "epochs"),
    *("learning_rate", "data", "heldout", "output", "overwrite"),
)
_MIN_VOCABULARY = 16  # tokens; about the number of choices per head


class AdaptOptions(EngineOptions, PromptFile):
    """Options of `vllm_medusa.adapt.pipeline.adapt` and of `vllm-medusa adapt`."""

    target: Source = option("a folder or a hub name", positional=True)
    output: Path = option("folder for the heads and their report", "-o")
    work: Path | None = option("folder for records, logs...", default=None, shown="OUTPUT.work")
    seed: Seed = option(default=0)
    batch: Positive | None = option(  # type: ignore[assignment]
        "number of concurrent prompts", default=None, shown="64, fewer if memory is limited"
    )
    samples: Positive = option("texts per prompt", default=1)
    max_tokens: Positive = option("max tokens per answer", default=512)
    temperature: AtLeastZero = option("sampling, also in the final measurement", default=0.7)
    heldout_share: Annotated[float, Number(float, 0, 0.5, above=True)] = option(
        "share of prompts held out: half to calibrate, half to measure",
        default=0.1,
        shown="0.1, at least 8 prompts",
    )
    drafter: Literal["medusa", "hydra", "eagle3"] = option(
        "independent heads, sequentially dependent heads, or a drafter with a decoder layer",
        default="medusa",
    )
    method: Literal["medusa-1", "medusa-2"] = option("of medusa", default="medusa-1")
    num_heads: Positive = option(
        "number of heads; for eagle3, of tokens ahead in training", default=HeadOptions.num_heads
    )
    num_layers: Positive = option("residual layers per head", default=HeadOptions.num_layers)
    epochs: Positive = option("passes over the texts", default=StepOptions.epochs)
    learning_rate: Above | None = option("peak learning rate of the heads", default=None)
    train_args: str = option(
        "further options of train, as in --train-args='--labels tokens'", default="", metavar="TEXT"
    )
    num_draft_tokens: TreeSize | None = option(
        "size of the heads' own tree (default: the fastest)", default=None, metavar="N"
    )
    budgets: tuple[TreeSize, ...] = option(
        "sizes to measure, besides automatic trees", default=(4, 16), metavar="N"
    )
    measure_tokens: Positive = option("max tokens per answer in the final measurement", default=128)
    measure_prompts: Positive = option("max prompts in the final measurement", default=32)
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
        if self.drafter == "eagle3" and self.num_draft_tokens is not None:
            raise ValueError(
                f"--num-draft-tokens {self.num_draft_tokens} is the size of the heads' own tree; "
                "an EAGLE-3 drafter has none and builds one in each step. Omit it; --budgets "
                f"{self.num_draft_tokens} measures trees of that size."
            )


def training_of(options: AdaptOptions) -> TrainOptions:
    """Training options of adapt; the stage sets the files."""
    return TrainOptions(
        model=options.target,
        method=options.method,
        files=TextFiles(data=Path("data"), heldout=Path("heldout"), output=Path("output")),
        heads=HeadOptions(
            kind=options.drafter, num_heads=options.num_heads, num_layers=options.num_layers
        ),
        training=StepOptions(
            epochs=options.epochs, learning_rate=options.learning_rate, seed=options.seed
        ),
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
            f"--train-args has --{name}, which adapt sets itself: pass it to adapt (--heads as "
            "--drafter), or omit it."
        )
    if 0 < (size := given["draft_vocab"] or 0) < _MIN_VOCABULARY:
        raise ValueError(
            f"--train-args has --draft-vocab {size}; a drafter of fewer than "
            f"{_MIN_VOCABULARY} tokens drafts nothing. Use thousands, or 0 for all tokens."
        )
