"""What jobs over files of prompts are asked for; groups that several of them share come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from vllm_medusa.offline.engine import EngineSettings, Sampling, medusa_config
from vllm_medusa.options import AtLeastZero, Options, Positive, Share, group, option, required


class PromptFile(Options):
    """What is read and written."""

    prompts: Path = required("the file of prompts", "-i")
    output: Path = required("results, as JSON lines", "-o")
    format: Literal["auto", "text", "jsonl", "parquet"] = option(
        "auto", "of the prompts; auto: by the file's suffix", shown=""
    )
    column: str | None = option(None, "key or column that holds the prompt; absent: by its name")
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse", "refuse: do nothing while the file has a bad line; skip: leave it out"
    )
    overwrite: bool = option(False, "throw away the output's content")


class MedusaOptions(Options):
    """Heads and their tree."""

    speculative_model: str | None = option(
        None, "heads; absent: those in the target's folder", metavar="HEADS"
    )
    tree: str | None = option(None, "preset name, JSON file, or JSON such as '{\"dense\":[4,2]}'")
    num_speculative_tokens: Positive | None = option(None, "at most N draft nodes", metavar="N")

    def speculative_config(self) -> dict[str, Any] | None:
        """What vLLM is given; None: no speculation.

        Raises:
            ValueError: a text that begins like JSON and isn't.

        """
        return medusa_config(
            self.speculative_model, self.tree, num_speculative_tokens=self.num_speculative_tokens
        )


class SamplingOptions(Options):
    """How tokens are cut off, in all jobs."""

    top_p: Share = option(1.0)
    top_k: int = option(0, "0 or -1: all tokens", shown="")
    stop: tuple[str, ...] = option((), "stop text; may be repeated", repeat=True)


class EngineOptions(Options):
    """vLLM's engine."""

    dtype: str = option("auto")
    max_model_len: Positive | None = option(None)
    engine_args: dict[str, Any] = option({}, "more LLM arguments", metavar="JSON")


class BatchOptions(EngineOptions):
    """vLLM's engine, with a batch of prompts always in it."""

    batch: Positive = option(64, "prompts at a time")
    log_level: str | None = option(None, "show vLLM's log from this level on, such as INFO")


class PromptJob(Options):
    """What all jobs take that run a file of prompts through vLLM."""

    model: str = required("the target: a folder or a hub name", positional=True)
    files: PromptFile = group(PromptFile, "files")
    medusa: MedusaOptions = group(MedusaOptions, "Medusa")
    engine: BatchOptions = group(BatchOptions, "engine")

    def engine_settings(self) -> EngineSettings:
        """What the engine is built from.

        Raises:
            ValueError: see `MedusaOptions.speculative_config`.

        """
        engine = self.engine
        return EngineSettings(
            self.model,
            self.medusa.speculative_config(),
            engine.dtype,
            engine.max_model_len,
            engine.engine_args,
        )


class GenerateMedusa(MedusaOptions):
    """Speculation, or none."""

    acceptance: str | None = option(None, "lossless (default), typical, or JSON")
    no_medusa: bool = option(False, "plain vLLM")

    def check(self) -> None:
        """See `Options.check`."""
        others = (self.speculative_model, self.tree, self.acceptance, self.num_speculative_tokens)
        if self.no_medusa and any(other is not None for other in others):
            raise ValueError("--no-medusa contradicts the other Medusa options; drop one of them.")

    def speculative_config(self) -> dict[str, Any] | None:
        """See `MedusaOptions.speculative_config`."""
        if self.no_medusa:
            return None
        return medusa_config(
            self.speculative_model, self.tree, self.acceptance, self.num_speculative_tokens
        )


class GenerateSampling(SamplingOptions):
    """How tokens are drawn."""

    max_tokens: Positive = option(256, "of each answer")
    temperature: AtLeastZero = option(0.0)
    seed: int | None = option(None, "prompt i uses the seed SEED + i")
    ignore_eos: bool = option(False)

    def sampling(self) -> Sampling:
        """The sampling parameters of all requests."""
        return Sampling(
            self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, self.ignore_eos
        )


class GenerateOptions(PromptJob):
    """Options of `vllm_medusa.offline.generate.generate` and of `vllm-medusa generate`."""

    medusa: GenerateMedusa = group(GenerateMedusa, "Medusa")
    sampling: GenerateSampling = group(GenerateSampling, "sampling")


class CompareOptions(Options):
    """Options of `vllm_medusa.offline.comparison.compare` and of `vllm-medusa compare`."""

    target: str = required("a folder or a hub name", positional=True)
    heads: str = required("a folder, a file or a hub name", positional=True)
    data: Path | None = option(None, "a file of records; this or --prompts", metavar="RECORDS")
    prompts: Path | None = option(None, "a file of prompts; this or --data", metavar="FILE")
    on_bad_line: Literal["refuse", "skip"] = option("refuse")
    limit: Positive = option(32, "use the first prompts")
    tree: str | None = option(None, "instead of the one in the heads' config")
    budgets: tuple[Positive, ...] = option((4, 8, 16, 32), "numbers of draft nodes", metavar="N")
    temperature: AtLeastZero | None = option(None, "(that of the records, or 0)")
    max_tokens: Positive = option(128, "of each answer")
    seed: int = option(0, "prompt i uses SEED + i")
    batch: Positive = option(1, "prompts at a time")
    rounds: Positive = option(3, "repetitions")
    engine: EngineOptions = group(EngineOptions)
    output: Path | None = option(None, "write the figures as JSON", metavar="FILE")

    def check(self) -> None:
        """See `Options.check`."""
        if (self.data is None) == (self.prompts is None):
            raise ValueError("give one of --data and --prompts, what is to be continued.")
