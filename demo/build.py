"""Rebuild the demo's tokenizer, target and Medusa heads from scratch, from Python source alone.

    python -m demo.build all --out build/demo               # the full recipe: hours on one core
    python -m demo.build all --out build/demo --tokens 200k # the same in small, to try it out
    python -m demo.build heads --out build/demo --target demo/target   # only new heads

Stages: tokenizer -> target -> heads; `all` runs the three. What a stage has finished is kept in
OUT/work and used again, an interrupted stage goes on where its last checkpoint was written.
The text is the standard library and the installed packages of the Python that runs this; nothing
is downloaded. Every number of the recipe is in `demo/recipe.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from demo.corpus import (
    BuildError,
    SourceFile,
    default_roots,
    find_sources,
    tokenize,
    training_texts,
)
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.target_stage import heldout_loss, train_target, train_tokenizer
from vllm_medusa.files import digest, digest_json, write_json
from vllm_medusa.job import Progress
from vllm_medusa.options import Above, Options, Positive, Seed, option

STAGES = ("tokenizer", "target", "heads")


def amount(text: str) -> int:
    """Read a count such as 1500, 200k or 15M."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        value = int(float(text[:-1] if unit > 1 else text) * unit)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError(f"{text!r} is not a count; give one such as 1500, 200k, 15M")
    return value


class BuildOptions(Options):
    """What is built, from what."""

    stage: Literal["tokenizer", "target", "heads", "all"] = option(positional=True)
    out: Path = option("folder for results and work files")
    target: Path | None = option("train heads for this model (OUT/target)", default=None)
    sources: tuple[Path, ...] = option(
        "folders with .py files (standard library and installed packages)", default=()
    )
    tokens: Positive | None = option(
        "training tokens of the stage, with `all` of the target; the rest scales along (target "
        "15M, heads 2.4M)",
        default=None,
        parse=amount,
    )
    minutes: Above | None = option("end the target's training after about this", default=None)
    threads: Positive = option("CPU threads", default=1)
    seed: Seed = option(default=0)

    def check(self) -> None:
        """See `Options.check`."""
        if self.target is not None and self.stage != "heads":
            raise ValueError("--target names a finished model: it goes with the stage 'heads' only")


def scaled(stage: str, tokens: int | None) -> tuple[CorpusRecipe, TargetRecipe, HeadsRecipe]:
    """Return the recipes, scaled so that the stage (the target of `all`) sees so many tokens."""
    corpus, target, heads = CorpusRecipe(), TargetRecipe(), HeadsRecipe()
    if tokens is None:
        return corpus, target, heads
    factor = tokens / (heads.tokens if stage == "heads" else target.tokens)
    few = max(8 * target.context, int(corpus.heldout_tokens * min(1.0, factor)))
    if stage != "heads":
        target = replace(target, tokens=max(tokens, target.batch_size * target.context))
    heads = replace(
        heads,
        tokens=int(heads.tokens * factor),
        heldout_prompts=max(8, int(heads.heldout_prompts * min(1.0, factor))),
    )
    size = max(500_000, int(corpus.tokenizer_bytes * min(1.0, factor)))
    return replace(corpus, heldout_tokens=few, tokenizer_bytes=size), target, heads


@dataclass
class Build:
    """One build: its output folder, where its text comes from, its recipes."""

    out: Path
    target: Path  # where the target is, or will be
    roots: list[Path]  # folders with .py files
    corpus: CorpusRecipe
    target_recipe: TargetRecipe
    heads_recipe: HeadsRecipe
    minutes: float | None  # bounds the target's training
    seed: int
    progress: Progress

    @cached_property
    def work(self) -> Path:
        """The folder of everything that can be used again."""
        folder = self.out / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @cached_property
    def sources(self) -> list[SourceFile]:
        """The Python files, found once."""
        return find_sources(self.roots, self.corpus)

    def tokens(self, num_tokens: int, *, heldout: bool) -> np.ndarray:
        """Token stream of the target's tokenizer, uint16 [T], kept in the work folder."""
        path = self.target / "tokenizer.json"
        if not path.is_file():
            raise BuildError(f"{path} is missing; run the stage 'tokenizer' first")
        inputs = digest_json([digest(path), self.roots, asdict(self.corpus), num_tokens])[:10]
        kept = self.work / f"{'heldout' if heldout else 'train'}-{inputs}.bin"
        tokenizer = Tokenizer.from_file(str(path))
        tokens = tokenize(self.sources, tokenizer, num_tokens, kept, self.progress, heldout=heldout)
        if len(tokens) < num_tokens:
            self.progress.warn(
                f"the sources hold {len(tokens):,} tokens, {num_tokens:,} were asked for: texts "
                "will repeat"
            )
        return tokens

    def run_tokenizer(self) -> None:
        """Stage 1: a byte-level BPE of the target's vocabulary size."""
        if (self.target / "tokenizer.json").exists():
            self.progress.note(f"tokenizer: {self.target} has one; kept")
            return
        texts = training_texts(self.sources, self.corpus.tokenizer_bytes)
        train_tokenizer(texts, self.target_recipe.vocab_size, self.target)

    def run_target(self) -> None:
        """Stage 2: the base model."""
        if (self.target / "model.safetensors").exists():
            self.progress.note(f"target: {self.target} has one; kept")
            return
        recipe = self.target_recipe
        train = self.tokens(recipe.tokens, heldout=False)
        heldout = self.tokens(self.corpus.heldout_tokens, heldout=True)
        model = train_target(
            train,
            recipe,
            recipe.tokens,
            self.work / "target.pt",
            minutes=self.minutes,
            seed=self.seed,
            progress=self.progress,
        )
        loss = heldout_loss(model, heldout, recipe.context)
        model.to(torch.bfloat16).save_pretrained(self.target)
        figures = {"heldout_loss": loss, "recipe": asdict(recipe), "torch": torch.__version__}
        write_json(self.work / "target.json", figures)
        self.progress.note(f"target: {loss:.4f} nats a token of held-out text")

    def run_heads(self) -> None:
        """Stage 3: the target writes texts, heads are trained on them, their tree is chosen."""
        if not (self.target / "model.safetensors").is_file():
            raise BuildError(f"{self.target} holds no model; run the stage 'target' first")
        heads = self.out / "heads"
        if (heads / "calibration.safetensors").exists():
            self.progress.note(f"heads: {heads} has them; kept")
            return
        from demo.heads import make_heads

        train = self.tokens(self.target_recipe.tokens, heldout=False)
        heldout = self.tokens(self.corpus.heldout_tokens, heldout=True)
        arguments = (heads, self.work, train, heldout, self.heads_recipe, self.seed)
        tau = make_heads(self.target, *arguments, self.progress)
        self.progress.note(f"heads: {tau:.3f} tokens a step on held-out prompts")


def run(options: BuildOptions, progress: Progress) -> int:
    """Run the stages."""
    torch.set_num_threads(options.threads)
    build = Build(
        options.out,
        options.target or options.out / "target",
        list(options.sources) or default_roots(),
        *scaled(options.stage, options.tokens),
        options.minutes,
        options.seed,
        progress,
    )
    for stage in STAGES if options.stage == "all" else (options.stage,):
        getattr(build, f"run_{stage}")()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all went well, 2 for bad input."""
    from vllm_medusa.cli.console import run_job
    from vllm_medusa.cli.flags import add_flags, from_flags

    parser = argparse.ArgumentParser(
        prog="python -m demo.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, BuildOptions)
    args = parser.parse_args(argv)
    return run_job(
        lambda progress: run(from_flags(BuildOptions, args), progress),
        interrupted="the same command goes on from the last checkpoint",
    )


if __name__ == "__main__":
    sys.exit(main())
