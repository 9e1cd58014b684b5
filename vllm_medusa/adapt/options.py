"""Options of `adapt`, and what it passes to training."""

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

# What adapt's own options set in train's, and what else it needs as it has it.
_GIVEN_TO_ADAPT = (
    *("kind", "method", "seed", "dtype", "heldout_share"),
    *("num_heads", "num_layers", "epochs", "learning_rate"),
)
_SET_BY_ADAPT = ("data", "heldout", "output", "overwrite")
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
    train_args: str = option(
        "more of train's options, as in --train-args='--labels tokens'", default="", metavar="TEXT"
    )
    num_draft_tokens: TreeSize | None = option(
        "the tree's size; absent: fastest", default=None, metavar="N"
    )
    budgets: tuple[TreeSize, ...] = option(
        "sizes tried, beside automatic trees", default=(4, 16), metavar="N"
    )
    measure_tokens: Positive = option("of an answer, in the final measurement", default=128)
    measure_prompts: Positive = option("at most", default=32)
    measure_seconds: Above = option(
        "about so long: fewer rounds and prompts where they take longer", default=300.0, metavar="S"
    )

    @property
    def work_folder(self) -> Path:
        """Where stages leave what they make."""
        return self.work or self.output.parent / f"{self.output.name}.work"

    def check(self) -> None:
        """See `Options.check`."""
        for name, length in (
            ("max-tokens", self.max_tokens),
            ("measure-tokens", self.measure_tokens),
        ):
            if length < self.num_heads + 2:
                raise ValueError(
                    f"--{name} is {length}; {self.num_heads} heads need answers of at least "
                    f"{self.num_heads + 2} tokens."
                )
        if self.method == "medusa-2" and self.drafter != "medusa":
            raise ValueError(
                f"--method medusa-2 trains Medusa heads together with their target; --drafter is "
                f"{self.drafter}. Leave one of them out."
            )
        if self.drafter != "eagle3":
            return
        if self.num_draft_tokens is not None:
            raise ValueError(
                f"--num-draft-tokens {self.num_draft_tokens} is the size of the heads' own tree; "
                "an EAGLE-3 drafter has none and builds one in each step. Leave it out; --budgets "
                f"{self.num_draft_tokens} measures trees of that size."
            )
        if self.num_layers != 1:
            raise ValueError(
                f"--num-layers {self.num_layers} is for Medusa and Hydra heads: EAGLE-3 has one "
                "decoder layer. Leave it out."
            )


def training_of(options: AdaptOptions) -> TrainOptions:
    """What adapt asks of training; the files are filled in by the stage."""
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
    """Refuse training that is not adapt's own in what adapt decides.

    Raises ValueError: naming the option.
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
    if 0 < (size := given["draft_vocab"] or 0) < _MIN_VOCABULARY:
        raise ValueError(
            f"--train-args has --draft-vocab {size}; a drafter that knows fewer than "
            f"{_MIN_VOCABULARY} tokens drafts nothing. Give thousands, or 0 for all tokens."
        )
