"""What the jobs of training are asked for; calibration takes the same machine options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.options import MedusaOptions, PromptFile, PromptJob, SamplingOptions
from vllm_medusa.options import (
    AtLeastZero,
    Dtype,
    Number,
    Options,
    Positive,
    Seed,
    group,
    option,
    required,
)


class MachineOptions(Options):
    """Where and how transformers runs the target: `train`, `calibrate` and `tree` take these."""

    device: str = option("auto", "cpu, cuda, cuda:1; auto: a GPU if there is one", shown="auto")
    dtype: Dtype = option("auto", "the target computes in; auto: its own on GPUs, float32 on CPUs")
    quantization: Literal["4bit", "8bit"] | None = option(None, "of the target, by bitsandbytes")


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
