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
import hashlib
import json
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demo.corpus import (
    BuildError,
    SourceFile,
    default_roots,
    find_sources,
    rows,
    tokenize,
    training_texts,
)
from demo.heads_stage import (
    Rows,
    accuracies,
    best_tree,
    cache_hidden_states,
    label_ranks,
    train_heads,
)
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.sampling import sample_rows
from demo.target_stage import heldout_loss, train_target, train_tokenizer
from vllm_medusa.heads import save_heads

STAGES = ("tokenizer", "target", "heads")


class Build:
    """One output folder and what the stages share: sources, recipes, token files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seed: int = args.seed
        self.minutes: float | None = args.minutes
        self.out: Path = args.out
        self.target: Path = args.target or args.out / "target"
        self.work: Path = args.out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.corpus, self.target_recipe, self.heads_recipe = scaled(args.stage, args.tokens)
        self.roots: list[Path] = args.sources or default_roots()
        self._sources: list[SourceFile] | None = None

    def sources(self) -> list[SourceFile]:
        """Find the Python files, once."""
        if self._sources is None:
            self._sources = find_sources(self.roots, self.corpus)
        return self._sources

    def tokens(self, num_tokens: int, *, heldout: bool) -> np.ndarray:
        """Token stream of the target's tokenizer, uint16 [T], kept in the work folder."""
        path = self.target / "tokenizer.json"
        if not path.is_file():
            raise BuildError(f"{path} is missing; run the stage 'tokenizer' first")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        name = f"{'heldout' if heldout else 'train'}-{digest}-{num_tokens}.bin"
        tokenizer = Tokenizer.from_file(str(path))
        tokens = tokenize(self.sources(), tokenizer, num_tokens, self.work / name, heldout=heldout)
        if len(tokens) < num_tokens:
            say(f"the sources hold {len(tokens):,} tokens, {num_tokens:,} asked: texts will repeat")
        return tokens

    def load_target(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the target in fp32 and its tokenizer."""
        if not (self.target / "model.safetensors").is_file():
            raise BuildError(f"{self.target} holds no model; run the stage 'target' first")
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)
        return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(self.target)

    def run_tokenizer(self) -> None:
        """Stage 1: a byte-level BPE of the target's vocabulary size."""
        if (self.target / "tokenizer.json").exists():
            say(f"tokenizer: {self.target} has one; kept")
            return
        texts = training_texts(self.sources(), self.corpus.tokenizer_bytes)
        train_tokenizer(texts, self.target_recipe.vocab_size, self.target)

    def run_target(self) -> None:
        """Stage 2: the base model."""
        if (self.target / "model.safetensors").exists():
            say(f"target: {self.target} has one; kept")
            return
        recipe = self.target_recipe
        train = self.tokens(recipe.tokens, heldout=False)
        heldout = self.tokens(self.corpus.heldout_tokens, heldout=True)
        checkpoint = self.work / "target.pt"
        model = train_target(
            train, recipe, recipe.tokens, checkpoint, minutes=self.minutes, seed=self.seed
        )
        loss = heldout_loss(model, heldout, recipe.context)
        model.to(torch.bfloat16).save_pretrained(self.target)
        self.report("target", {"heldout_loss": round(loss, 4), "recipe": asdict(recipe)})

    def run_heads(self) -> None:
        """Stage 3: sample text from the target, train the heads, measure them, choose the tree."""
        recipe = self.heads_recipe
        model, tokenizer = self.load_target()
        train = self.tokens(self.target_recipe.tokens, heldout=False)
        heldout = rows(self.tokens(self.corpus.heldout_tokens, heldout=True), recipe.context)
        source = rows(train, recipe.context)
        picked = np.random.default_rng(self.seed).permutation(len(source))
        source = source[picked[: max(1, recipe.source_tokens // recipe.context)]]
        count = max(1, recipe.sampled_tokens // recipe.context)
        parts = [
            self.text_rows(model, "source", source),
            self.sampled(model, tokenizer, train, "sampled", count, recipe.temperatures)[0],
        ]
        heads = train_heads(model, parts, recipe, self.work / "heads.pt", seed=self.seed)
        heads = heads.to(torch.bfloat16).float()  # measure what is stored

        own, prompts = self.sampled(
            model,
            tokenizer,
            heldout.reshape(-1),
            "sampled-heldout",
            recipe.heldout_rows,
            (recipe.tree_temperature,),
        )
        lm_head = model.lm_head.weight.detach()
        ranks = label_ranks(heads, lm_head, own, prompts)
        text = self.text_rows(model, "source-heldout", heldout[: recipe.heldout_rows])
        tree, shares = best_tree(ranks, recipe.tree_draft_tokens, recipe.tree_max_rank)
        report = {
            "base_model_name_or_path": "demo/target",
            "tree": tree,
            "tree_node_accepted": shares,
            "expected_tokens_per_step": round(1 + sum(shares), 3),
            "head_accuracies_sampled": accuracies(ranks, recipe.tree_max_rank),
            "head_accuracies_source": accuracies(
                label_ranks(heads, lm_head, text), recipe.tree_max_rank
            ),
            "training": asdict(recipe),
        }
        save_heads(self.out / "heads", heads.to(torch.bfloat16), report)
        self.report("heads", report)

    def text_rows(self, model: PreTrainedModel, name: str, ids: np.ndarray) -> Rows:
        """Source text, labelled at temperature 1."""
        return cache_hidden_states(model, ids, np.ones(len(ids)), self.work / f"{name}.hidden")

    def sampled(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tokens: np.ndarray,
        name: str,
        count: int,
        temperatures: tuple[float, ...],
    ) -> tuple[Rows, np.ndarray]:
        """Text that the target wrote, kept in the work folder, and its prompt lengths [R]."""
        path = self.work / f"{name}.npz"
        if not path.exists():
            seed = self.seed + len(name)  # training and held-out rows differ
            ids, prompts, at = sample_rows(
                model,
                tokenizer,
                tokens,
                count,
                self.heads_recipe,
                temperatures=temperatures,
                seed=seed,
                label=name,
            )
            np.savez(path, ids=ids, prompts=prompts, temperatures=at)
        kept = np.load(path)
        hidden = self.work / f"{name}.hidden"
        part = cache_hidden_states(model, kept["ids"], kept["temperatures"], hidden)
        return part, kept["prompts"]

    def report(self, stage: str, figures: dict[str, object]) -> None:
        """Write OUT/work/<stage>.json and say the main figures."""
        figures = {
            "seed": self.seed,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **figures,
        }
        (self.work / f"{stage}.json").write_text(json.dumps(figures, indent=2) + "\n")
        for key in ("heldout_loss", "expected_tokens_per_step"):
            if key in figures:
                say(f"{stage}: {key} {figures[key]}")


def say(text: str) -> None:
    """Print one line between progress bars."""
    print(text, file=sys.stderr, flush=True)


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
        build = Build(args)
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
