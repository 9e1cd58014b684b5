"""What jobs over files of prompts are asked for; groups that several of them share come first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.engine import EngineSettings, Sampling, medusa_config
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Number,
    Options,
    Positive,
    Seed,
    Share,
    Source,
    group,
    option,
)
from vllm_medusa.tree.topology import MAX_NODES

TreeSize = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # draft nodes


class PromptFile(Options):
    """What is read and written."""

    prompts: Path = option("the file of prompts", "-i")
    output: Path = option("results, as JSON lines", "-o")
    format: Literal["auto", "text", "jsonl", "parquet"] = option(
        "of the prompts; auto: by the file's suffix", default="auto", shown=""
    )
    column: str | None = option(
        "key or column that holds the prompt; absent: by its name", default=None
    )
    on_bad_line: Literal["refuse", "skip"] = option(
        "refuse: do nothing while the file has a bad line; skip: leave it out", default="refuse"
    )
    overwrite: bool = option("throw away the output's content", default=False)


# as vLLM names them
EngineDtype = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]


class MedusaOptions(Options):
    """Heads and their tree."""

    speculative_model: Source | None = option(
        "heads; absent: those in the target's folder", default=None, metavar="HEADS"
    )
    tree: str | None = option(
        "preset name, JSON file, or JSON such as '{\"dense\":[4,2]}'", default=None
    )
    num_speculative_tokens: Positive | None = option(
        "at most N draft nodes", default=None, metavar="N"
    )
    budget: str | None = option(
        "in place of --tree: dynamic trees, auto or N nodes a request or '{\"max_rows\": N}'",
        default=None,
    )
    lookup: bool = option(
        "draft what followed the last tokens before, too; without HEADS, only that", default=False
    )

    def check(self) -> None:
        """Refuse what no engine takes, before one starts."""
        if (config := self.speculative_config()) is not None:
            from vllm_medusa.config import EagleConfig, MedusaConfig, resolve_tree  # slow

            if config["method"] != "medusa":
                own = {key: value for key, value in config.items() if key != "method"}
                EagleConfig.from_speculative_config(own)
                return
            MedusaConfig.from_speculative_config(config)
            resolve_tree(self.tree, max_draft_tokens=self.num_speculative_tokens)

    def speculative_config(self) -> dict[str, Any] | None:
        """What vLLM is given; None: no speculation.

        Raises:
            ValueError: a text that begins like JSON and isn't.

        """
        return medusa_config(
            self.speculative_model,
            self.tree,
            num_speculative_tokens=self.num_speculative_tokens,
            budget=self.budget,
            lookup=self.lookup,
        )


class CutOptions(Options):
    """How distributions and answers are cut off, in all jobs."""

    top_p: Share = option(default=1.0)
    top_k: int = option("0 or -1: all tokens", default=0, shown="")
    stop: tuple[str, ...] = option("stop text; may be repeated", default=(), repeat=True)


class EngineOptions(Options):
    """vLLM's engine."""

    dtype: EngineDtype = option(default="auto")
    max_model_len: Positive | None = option(default=None)
    engine_args: dict[str, Any] = option("more LLM arguments", default={}, metavar="JSON")


class BatchOptions(EngineOptions):
    """vLLM's engine, with a batch of prompts always in it."""

    batch: Positive = option("prompts at a time", default=64)
    log_level: str | None = option("show vLLM's log from this level on, such as INFO", default=None)


class PromptJob(Options):
    """What all jobs take that run a file of prompts through vLLM."""

    model: Source = option("the target: a folder or a hub name", positional=True)
    files: PromptFile = group("files")
    sampling: Options  # each job has its own
    medusa: MedusaOptions = group("Medusa", factory=MedusaOptions)
    engine: BatchOptions = group("engine", factory=BatchOptions)

    def engine_settings(self) -> EngineSettings:
        """What the engine is built from.

        Raises:
            ValueError: see `MedusaOptions.speculative_config`; or Medusa is asked for in
                ``engine_args`` too, which has options for it.

        """
        engine, medusa = self.engine, self.medusa.speculative_config()
        other = engine.engine_args.get("speculative_config") or {}
        if other and (medusa is not None or "medusa" in str(other)):
            raise ValueError(
                f"--engine-args: speculative_config is {other}; Medusa has options of its own "
                "here. Say --speculative-model, --tree, --budget, --lookup and the like instead."
            )
        return EngineSettings(
            self.model,
            medusa,
            engine.dtype,
            engine.max_model_len,
            engine.engine_args,
        )


class GenerateMedusa(MedusaOptions):
    """Speculation, or none."""

    acceptance: str | None = option("lossless (default), typical, or JSON", default=None)
    no_medusa: bool = option("plain vLLM", default=False)

    def check(self) -> None:
        """See `Options.check`."""
        others = (
            self.speculative_model,
            self.tree,
            self.acceptance,
            self.budget,
            self.num_speculative_tokens,
            self.lookup or None,
        )
        if self.no_medusa and any(other is not None for other in others):
            raise ValueError("--no-medusa contradicts the other Medusa options; drop one of them.")
        super().check()

    def speculative_config(self) -> dict[str, Any] | None:
        """See `MedusaOptions.speculative_config`."""
        if self.no_medusa:
            return None
        return medusa_config(
            self.speculative_model,
            self.tree,
            self.acceptance,
            self.num_speculative_tokens,
            self.budget,
            self.lookup,
        )


class GenerateSampling(Options):
    """How tokens are drawn."""

    max_tokens: Positive = option("of each answer", default=256)
    temperature: AtLeastZero = option(default=0.0)
    seed: Seed | None = option("prompt i uses the seed SEED + i", default=None)
    ignore_eos: bool = option(default=False)
    cut: CutOptions = group(factory=CutOptions)

    def sampling(self) -> Sampling:
        """The sampling parameters of all requests."""
        cut = self.cut
        return Sampling(
            self.max_tokens, self.temperature, cut.top_p, cut.top_k, cut.stop, self.ignore_eos
        )


class GenerateOptions(PromptJob):
    """Options of `vllm_medusa.offline.generate.generate` and of `vllm-medusa generate`."""

    sampling: GenerateSampling = group("sampling", factory=GenerateSampling)
    medusa: GenerateMedusa = group("Medusa", factory=GenerateMedusa)


class CompareOptions(Options):
    """Options of `vllm_medusa.offline.comparison.compare` and of `vllm-medusa compare`."""

    target: Source = option("a folder or a hub name", positional=True)
    heads: Source = option("a folder, a file or a hub name", positional=True)
    data: Path | None = option(
        "a file of records; this or --prompts", default=None, metavar="RECORDS"
    )
    prompts: Path | None = option("a file of prompts; this or --data", default=None, metavar="FILE")
    on_bad_line: Literal["refuse", "skip"] = option(default="refuse")
    limit: Positive = option("use the first prompts", default=32)
    tree: str | None = option("instead of the one in the heads' config", default=None)
    budgets: tuple[TreeSize, ...] = option(
        "numbers of draft nodes, as far as the tree has so many",
        default=(4, 8, 16, 32),
        metavar="N",
    )
    no_automatic: bool = option(
        "leave out the trees that the engine chooses, the default where no tree is named",
        default=False,
    )
    temperature: AtLeastZero | None = option("(that of the records, or 0)", default=None)
    max_tokens: Positive = option("of each answer", default=128)
    seed: Seed = option("prompt i uses SEED + i", default=0)
    batch: Positive = option("prompts at a time", default=1)
    rounds: Positive = option("repetitions", default=3)
    seconds: Above | None = option(
        "about so long: where all prompts and rounds take longer, fewer are measured",
        default=None,
        metavar="S",
    )
    engine: EngineOptions = group(factory=EngineOptions)
    output: Path | None = option("write the figures as JSON", default=None, metavar="FILE")

    def check(self) -> None:
        """See `Options.check`."""
        if (self.data is None) == (self.prompts is None):
            raise ValueError("give one of --data and --prompts, what is to be continued.")
