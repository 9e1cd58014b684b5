"""Options of `generate`, `distill` and `compare`; shared ones come first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from vllm_medusa.offline.engine import EngineSettings, Sampling, medusa_config
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    Number,
    Options,
    Positive,
    Seed,
    Share,
    Source,
    option,
)
from vllm_medusa.tree.topology import MAX_NODES

TreeSize = Annotated[int, Number(int, 1, MAX_NODES - 1)]  # draft nodes
OnBadLine = Literal["refuse", "skip"]


class PromptFile(Options):
    """A file of prompts and its output."""

    title = "files"
    prompts: Path = option("a file of prompts: .txt, .jsonl or .parquet", "-i")
    output: Path = option("file for results, as JSON lines", "-o")
    column: str | None = option(
        "key or column of the prompt (default: prompt, messages or turns)", default=None
    )
    on_bad_line: OnBadLine = option("bad lines: refuse the file, or skip them", default="refuse")
    overwrite: bool = option("discard the output's content", default=False)


class EngineOptions(Options):
    """vLLM's engine."""

    title = "engine"
    dtype: Dtype = option(default="auto")
    max_model_len: Positive | None = option(default=None)
    batch: Positive = option("number of concurrent prompts", default=64)
    engine_args: dict[str, Any] = option("further arguments of LLM", default={}, metavar="JSON")


class Speculation(Options):
    """A drafter and its trees."""

    title = "speculation"
    speculative_model: Source | None = option(
        "heads or an EAGLE drafter (for a full Medusa-2 model, the model itself); default: "
        "plain vLLM",
        default=None,
        metavar="HEADS",
    )
    tree: str | None = option(
        "preset name, JSON file, or JSON such as '{\"dense\":[4,2]}'", default=None
    )
    num_speculative_tokens: Positive | None = option(
        "max number of draft nodes", default=None, metavar="N"
    )
    budget: str | None = option(
        "dynamic trees, instead of --tree: auto, N nodes per request, or '{\"max_rows\": N}'",
        default=None,
    )
    lookup: bool = option(
        "also draft copies of the request's own text; without HEADS, only these", default=False
    )

    def check(self) -> None:
        """Refuse invalid options before an engine starts."""
        config = self.speculative_config()
        if config is None:
            for name in ("tree", "num_speculative_tokens", "budget", "acceptance"):
                if getattr(self, name, None) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} needs heads, --speculative-model HEADS, or "
                        "--lookup, which only copies from the text."
                    )
            return
        from vllm_medusa.config import EagleConfig, MedusaConfig, resolve_tree  # slow

        if config["method"] != "medusa":
            EagleConfig.from_speculative_config({k: v for k, v in config.items() if k != "method"})
            return
        MedusaConfig.from_speculative_config(config)
        resolve_tree(self.tree, max_draft_tokens=self.num_speculative_tokens)

    def speculative_config(self) -> dict[str, Any] | None:
        """The argument of vLLM's ``LLM``; None: no speculation.

        Raises ValueError: a text that looks like JSON but is invalid.
        """
        if self.speculative_model is None and not self.lookup:
            return None
        return medusa_config(
            self.speculative_model,
            self.tree,
            getattr(self, "acceptance", None),
            self.num_speculative_tokens,
            self.budget,
            self.lookup,
        )


class PromptJob(EngineOptions, Speculation, PromptFile):
    """A file of prompts run through vLLM."""

    model: Source = option("the target: a folder or a hub name", positional=True)
    max_tokens: Positive = option("max tokens per answer", default=256)
    top_p: Share = option(default=1.0)
    top_k: int = option("number of tokens; 0 or -1: all", default=0, shown="")
    stop: tuple[str, ...] = option("strings that end an answer", default=(), metavar="TEXT")

    def engine_settings(self) -> EngineSettings:
        """The engine's settings.

        Raises ValueError: see `speculative_config`; or ``engine_args`` has one too.
        """
        speculation = self.speculative_config()
        other = self.engine_args.get("speculative_config") or {}
        if other and (speculation is not None or "medusa" in str(other)):
            raise ValueError(
                f"--engine-args: speculative_config is {other}; it has its own options. Use "
                "--speculative-model, --tree, --budget, --lookup etc. instead."
            )
        return EngineSettings(
            self.model, speculation, self.dtype, self.max_model_len, self.engine_args
        )


class GenerateOptions(PromptJob):
    """Options of `vllm_medusa.offline.generate.generate` and of `vllm-medusa generate`."""

    temperature: AtLeastZero = option(default=0.0)
    seed: Seed | None = option("seed of prompt i is SEED + i", default=None)
    ignore_eos: bool = option(default=False)
    acceptance: str | None = option("lossless (default), typical, or JSON", default=None)

    def sampling(self) -> Sampling:
        """The sampling parameters of all requests."""
        return Sampling(
            self.max_tokens, self.temperature, self.top_p, self.top_k, self.stop, self.ignore_eos
        )


class DistillOptions(PromptJob):
    """Options of `vllm_medusa.training.distill.distill` and of `vllm-medusa distill`."""

    prompts: Path | None = option(  # type: ignore[assignment]
        "a file of prompts; without it, the target generates the first turns (--conversations)",
        "-i",
        default=None,
    )
    output: Path = option("file for records, as JSON lines", "-o")
    max_tokens: Positive = option("max tokens per answer", default=512)
    samples: Annotated[int, Number(int, 1, 10_000)] = option(
        "texts per prompt", default=1, metavar="N"
    )
    temperature: tuple[AtLeastZero, ...] = option(
        "one or more; successive samples use the next one", default=(0.7,), metavar="T"
    )
    seed: Seed = option("seed of text i is SEED + i", default=0)
    self_talk: bool = option("the target also generates the user's later turns", default=False)
    conversations: Positive | None = option(
        "number of self-talk conversations started by the target, without --prompts",
        default=None,
        metavar="N",
    )
    turns: Positive | None = option(
        "answers per --self-talk conversation", default=None, metavar="N", shown="3"
    )

    def check(self) -> None:
        """See `Options.check`."""
        super().check()
        if (self.prompts is None) == (self.conversations is None):
            raise ValueError("pass either --prompts FILE, or --conversations N with --self-talk.")
        for name in ("conversations", "turns"):
            if getattr(self, name) is not None and not self.self_talk:
                raise ValueError(
                    f"--{name} {getattr(self, name)} needs --self-talk, where the target generates "
                    "the user's turns. Pass both, or omit it."
                )
        of_zero = (slot for slot, value in enumerate(self.temperature) if value == 0)
        greedy = sum(len(range(slot, self.samples, len(self.temperature))) for slot in of_zero)
        if greedy > 1:
            shown = " ".join(f"{value:g}" for value in self.temperature)
            raise ValueError(
                f"--samples {self.samples} at temperature {shown} gives {greedy} copies of a "
                "text at temperature 0; use fewer samples, or raise --temperature."
            )


class CompareOptions(EngineOptions):
    """Options of `vllm_medusa.offline.comparison.compare` and of `vllm-medusa compare`."""

    target: Source = option("a folder or a hub name", positional=True)
    heads: Source = option("a folder, a file or a hub name", positional=True)
    prompts: Path = option("a file of prompts or records", "-i")
    on_bad_line: OnBadLine = option(default="refuse")
    limit: Positive = option("number of prompts, from the start of the file", default=32)
    tree: str | None = option("tree to use instead of the one in the heads' config", default=None)
    budgets: tuple[TreeSize, ...] = option(
        "numbers of draft nodes, up to the size of the tree",
        default=(4, 8, 16, 32),
        metavar="N",
    )
    no_automatic: bool = option(
        "do not measure dynamic trees",
        default=False,
    )
    temperature: AtLeastZero = option(default=0.0)
    max_tokens: Positive = option("max tokens per answer", default=128)
    seed: Seed = option("seed of prompt i is SEED + i", default=0)
    batch: Positive = option("number of concurrent prompts", default=1)
    rounds: Positive = option("repetitions", default=3)
    seconds: Above | None = option(
        "approximate time limit: prompts and rounds are reduced to fit",
        default=None,
        metavar="S",
    )
    output: Path | None = option("file for the figures, as JSON", default=None, metavar="FILE")
