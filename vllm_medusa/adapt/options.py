"""Options of `adapt`: its own, and the training options that it does not set itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from vllm_medusa.offline.options import EngineOptions, PromptFile, Samples, TreeSize
from vllm_medusa.options import Above, AtLeastZero, Model, Positive, group, option
from vllm_medusa.training.options import (
    CacheOptions,
    HeadOptions,
    JointOptions,
    StepOptions,
    TextFiles,
    TrainMachine,
    TrainOptions,
)

_MIN_VOCABULARY = 16  # tokens; about the number of choices per head


class AdaptOptions(EngineOptions, PromptFile):
    """Options of `vllm_medusa.adapt.pipeline.adapt` and of `vllm-medusa adapt`."""

    target: Model = option("a folder or a hub name", positional=True)
    output: Path = option("folder for the heads and their report", "-o")
    work: Path | None = option("folder for records, logs...", default=None, shown="OUTPUT.work")
    samples: Samples = option("texts per prompt", default=1)
    max_tokens: Positive = option("max tokens per answer", default=512)
    temperature: AtLeastZero = option(
        "sampling temperature, also in the final measurement", default=0.7
    )
    heldout_share: Annotated[float, Field(gt=0, le=0.5)] = option(
        "share of prompts not trained on: half are for calibration, half to measure",
        default=0.1,
        shown="0.1, at least 8 prompts",
    )
    budgets: tuple[TreeSize, ...] = option(
        "numbers of draft nodes to measure; the heads keep the fastest",
        default=(4, 16),
        metavar="N",
    )
    measure_tokens: Positive = option("max tokens per answer in the final measurement", default=128)
    measure_seconds: Above = option(
        "approximate time limit, without engine starts: rounds and prompts are reduced to fit",
        default=300.0,
        metavar="S",
    )
    method: Literal["medusa-1", "medusa-2"] = option(
        "medusa-1: the target stays as it is; medusa-2: it is trained with --drafter medusa",
        default="medusa-1",
    )
    dry_run: bool = option(
        "print the plan, with time and disk space needed, and stop", default=False
    )
    heads: HeadOptions = group("drafter", factory=HeadOptions)
    training: StepOptions = group("training; the seed applies to all stages", factory=StepOptions)
    cache: CacheOptions = group("medusa-1: hidden states of the target", factory=CacheOptions)
    joint: JointOptions = group("medusa-2: the joint stage", factory=JointOptions)

    @property
    def work_folder(self) -> Path:
        """The folder of the stages' results."""
        return self.work or self.output.parent / f"{self.output.name}.work"

    def check(self) -> None:
        """See `Options.check`."""
        self.train_options(TextFiles(data=self.prompts, heldout=self.prompts, output=self.output))
        heads, size = self.heads.num_heads, self.heads.draft_vocab
        if min(self.max_tokens, self.measure_tokens) < heads + 2:
            raise ValueError(
                f"--max-tokens is {self.max_tokens} and --measure-tokens {self.measure_tokens}; "
                f"{heads} heads need answers of at least {heads + 2} tokens."
            )
        if size and size < _MIN_VOCABULARY:
            raise ValueError(
                f"--draft-vocab is {size}; a drafter limited to fewer than {_MIN_VOCABULARY} "
                "tokens drafts nothing. Pass several thousand, or 0 for all tokens."
            )

    def train_options(self, files: TextFiles) -> TrainOptions:
        """Options of the training."""
        return TrainOptions(
            model=self.target,
            method=self.method,
            files=files,
            heads=self.heads,
            training=self.training,
            machine=TrainMachine(dtype=self.dtype),
            cache=self.cache,
            joint=self.joint,
        )
