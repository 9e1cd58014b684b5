"""Rebuild the demo's tokenizer, target and Medusa heads from scratch, from Python source alone.

    python -m demo.build all --out build/demo               # the full recipe: hours on one core
    python -m demo.build all --out build/demo --tokens 200k # the same in small, to try it out
    python -m demo.build heads --out build/demo --target demo/target   # only new heads

Stages: tokenizer -> target -> heads; `all` runs the three. What a stage has finished is kept in
OUT/work and used again, an interrupted stage goes on where its last checkpoint was written.
The text is the standard library and the installed packages of the Python that runs this; nothing
is downloaded. Every number of the recipe is in `demo/recipe.py`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from demo.corpus import BuildError, default_roots
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.stages import Build, say

STAGES = ("tokenizer", "target", "heads")


def scaled(stage: str, tokens: int | None) -> tuple[CorpusRecipe, TargetRecipe, HeadsRecipe]:
    """Return the recipes, scaled so that the stage (the target of `all`) sees so many tokens."""
    corpus, target, heads = CorpusRecipe(), TargetRecipe(), HeadsRecipe()
    if tokens is None:
        return corpus, target, heads
    whole = heads.source_tokens + heads.sampled_tokens if stage == "heads" else target.tokens
    factor = tokens / whole
    few = max(8 * target.context, int(corpus.heldout_tokens * min(1.0, factor)))
    if stage != "heads":
        target = replace(target, tokens=max(tokens, target.batch_size * target.context))
    heads = replace(
        heads,
        source_tokens=int(heads.source_tokens * factor),
        sampled_tokens=int(heads.sampled_tokens * factor),
        heldout_rows=min(heads.heldout_rows, few // heads.context),
    )
    size = max(500_000, int(corpus.tokenizer_bytes * min(1.0, factor)))
    return replace(corpus, heldout_tokens=few, tokenizer_bytes=size), target, heads


def amount(text: str) -> int:
    """Read a count such as 1500, 200k or 15M."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        value = int(float(text[:-1] if unit > 1 else text) * unit)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give one such as 1500, 200k, 15M")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.build",
        description="Rebuild the demo's tokenizer, target and Medusa heads from Python source.",
    )
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--out", type=Path, required=True, help="folder for results and work files")
    parser.add_argument("--target", type=Path, help="train heads for this model (OUT/target)")
    parser.add_argument(
        "--sources",
        type=Path,
        nargs="+",
        help="folders with .py files (standard library and installed packages)",
    )
    parser.add_argument(
        "--tokens",
        type=amount,
        help="training tokens of the stage, with `all` of the target; the rest scales along "
        "(target 15M, heads 2.4M)",
    )
    parser.add_argument("--minutes", type=float, help="end the target's training after about this")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes is {args.minutes}; it must be more than 0")
    if args.threads < 1:
        parser.error(f"--threads is {args.threads}; it must be at least 1")
    if args.target is not None and args.stage != "heads":
        parser.error("--target names a finished model: it goes with the stage 'heads' only")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the stages; 0 when all went well, 2 for bad input."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        corpus, target, heads = scaled(args.stage, args.tokens)
        build = Build(
            out=args.out,
            target=args.target or args.out / "target",
            roots=args.sources or default_roots(),
            corpus=corpus,
            target_recipe=target,
            heads_recipe=heads,
            minutes=args.minutes,
            seed=args.seed,
        )
        for stage in STAGES if args.stage == "all" else (args.stage,):
            getattr(build, f"run_{stage}")()
    except BuildError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("stopped; the same command goes on from the last checkpoint")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
