"""Options of `generate`, `distill` and `compare`; shared ones come first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import (
    Above,
    AtLeastZero,
    Dtype,
    Model,
    Options,
    Positive,
    Seed,
    Share,
    Source,
    Text,
    option,
)
from vllm_medusa.tree.topology import MAX_NODES

TreeSize = Annotated[int, Field(ge=1, lt=MAX_NODES)]  # draft nodes
TopK = Annotated[int, Field(ge=-1)]
Samples = Annotated[int, Field(ge=1, le=10_000)]
OnBadLine = Literal["refuse", "skip"]


class PromptFile(Options):
    """A file of prompts and its output."""

    title = "files"
    prompts: Path = option("a file of prompts: .txt, .jsonl or .parquet", "-i")
    output: Path = option("file for results, as JSON lines", "-o")
    column: Text | None = option(
        "key or column of the prompt (default: prompt, messages or turns)", default=None
    )
    on_bad_line: OnBadLine = option("bad lines: refuse the file, or skip them", default="refuse")
    overwrite: bool = option("discard the output's content", default=False)


class EngineOptions(Options):
    """vLLM's engine."""

    title = "engine"
    dtype: Dtype = option("dtype of the target; auto: its own", default="auto")
    max_model_len: Positive | None = option(
        "max tokens of prompt and answer", default=None, shown="the target's"
    )
    batch: Positive = option("number of concurrent prompts", default=64)
    engine_args: dict[str, Any] = option(
        "further arguments of vLLM's LLM", default={}, metavar="JSON"
    )


class Speculation(Options):
    """A drafter and its trees."""

    title = "speculation"
    speculative_model: Source | None = option(
        "heads or an EAGLE drafter (for a full Medusa-2 model, the same model)",
        default=None,
        metavar="HEADS",
    )
    speculative_config: dict[str, Any] = option(
        "further keys of LLM's speculative_config, such as '{\"budget\": 7}'; without HEADS, "
        "'{\"lookup\": true}' drafts by lookup alone. With neither option: plain vLLM",
        default={},
        metavar="JSON",
    )

    def check(self) -> None:
        """Refuse invalid options before an engine starts."""
        if (config := self.speculation()) is not None:
            check_speculation(config)

    def speculation(self) -> dict[str, Any] | None:
        """The whole ``speculative_config`` of vLLM's ``LLM``; None: no speculation."""
        if self.speculative_model is None and not self.speculative_config:
            return None
        return medusa_config(self.speculative_model, self.speculative_config)


def check_speculation(config: Mapping[str, Any]) -> None:
    """Check everything possible without the heads, before an engine starts."""
    from vllm_medusa.config import (  # slow
        DRAFTER_METHODS,
        MedusaConfig,
        refuse_misspelled,
        resolve_tree,
    )

    refuse_misspelled(config["method"])
    if config["method"] == "medusa":
        medusa = MedusaConfig.from_speculative_config(config)
        resolve_tree(medusa.tree, max_draft_tokens=medusa.num_speculative_tokens)
    elif "tree" in config and config["method"] in DRAFTER_METHODS:
        DRAFTER_METHODS[config["method"]].from_speculative_config(config)


class PromptJob(EngineOptions, Speculation, PromptFile):
    """A file of prompts run through vLLM."""

    model: Model = option("the target: a folder or a hub name", positional=True)
    max_tokens: Positive = option("max tokens per answer", default=256)
    top_p: Share = option("total probability of the tokens to sample from", default=1.0)
    top_k: TopK = option("number of tokens; 0 or -1: all", default=0, shown="")
    stop: tuple[Text, ...] = option("strings that end an answer", default=(), metavar="TEXT")

    def check(self) -> None:
        """See `Options.check`."""
        super().check()
        if "speculative_config" in self.engine_args:
            raise ValueError(
                "--engine-args has a speculative_config. Use --speculative-model and "
                "--speculative-config instead."
            )

    def llm_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``."""
        return {
            "model": self.model,
            "speculative_config": self.speculation(),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            **self.engine_args,
        }


class GenerateOptions(PromptJob):
    """Options of `vllm_medusa.offline.generate.generate` and of `vllm-medusa generate`."""

    temperature: AtLeastZero = option("sampling temperature; 0: greedy", default=0.0)
    seed: Seed | None = option("seed of prompt i is SEED + i", default=None)


class DistillOptions(PromptJob):
    """Options of `vllm_medusa.training.distill.distill` and of `vllm-medusa distill`."""

    prompts: Path | None = option(  # type: ignore[assignment]
        "a file of prompts; without it, the target generates the first turns (--conversations)",
        "-i",
        default=None,
    )
    output: Path = option("file for records, as JSON lines", "-o")
    max_tokens: Positive = option("max tokens per answer", default=512)
    samples: Samples = option("texts per prompt", default=1, metavar="N")
    temperature: tuple[AtLeastZero, ...] = option(
        "one or more; samples of a prompt cycle through them", default=(0.7,), metavar="T"
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
        if "acceptance" in self.speculative_config:
            raise ValueError(
                "--speculative-config has acceptance, but training texts must follow the "
                "target's own distribution. Omit it."
            )
        if (self.prompts is None) == (self.conversations is None):
            raise ValueError("pass either --prompts FILE, or --conversations N with --self-talk.")
        for name in ("conversations", "turns"):
            if getattr(self, name) is not None and not self.self_talk:
                raise ValueError(
                    f"--{name} {getattr(self, name)} needs --self-talk, with which the target "
                    "generates the user's turns. Pass both, or omit it."
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

    target: Model = option("a folder or a hub name", positional=True)
    heads: Source | None = option(
        "heads or a drafter: a folder, a file or a hub name; omit it for MTP and for lookup alone",
        positional=True,
        default=None,
    )
    prompts: Path = option("a file of prompts or records", "-i")
    on_bad_line: OnBadLine = option("bad lines: refuse the file, or skip them", default="refuse")
    limit: Positive = option("number of prompts, from the start of the file", default=32)
    speculative_config: dict[str, Any] = option(
        "further keys of LLM's speculative_config, such as a tree other than that of the heads; "
        'without HEADS, \'{"method": "mtp", "tree": "dynamic"}\' or \'{"lookup": true}\'',
        default={},
        metavar="JSON",
    )
    budgets: tuple[TreeSize, ...] = option(
        "fixed numbers of draft nodes, up to the size of the heads' tree",
        default=(4, 8, 16, 32),
        metavar="N",
    )
    temperature: AtLeastZero = option("sampling temperature; 0: greedy", default=0.0)
    max_tokens: Positive = option("max tokens per answer", default=128)
    seed: Seed = option("seed of prompt i is SEED + i", default=0)
    batch: Positive = option("number of concurrent prompts", default=1)
    rounds: Positive = option("repetitions", default=3)
    seconds: Above | None = option(
        "approximate time limit, without engine starts: prompts and rounds are reduced to fit",
        default=None,
        metavar="S",
    )
    output: Path | None = option("file for the figures, as JSON", default=None, metavar="FILE")
