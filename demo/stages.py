"""The three stages of the build, and what they share: folders, recipes, token files."""

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
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

from demo.corpus import BuildError, SourceFile, find_sources, rows, tokenize, training_texts
from demo.heads_stage import (
    Rows,
    accuracies,
    cache_hidden_states,
    label_ranks,
    train_heads,
)
from demo.recipe import CorpusRecipe, HeadsRecipe, TargetRecipe
from demo.sampling import sample_rows
from demo.target_stage import heldout_loss, train_target, train_tokenizer
from vllm_medusa.calibration.search import walked_tree
from vllm_medusa.heads import MedusaHeads, save_heads


def say(text: str) -> None:
    """Print one line between progress bars."""
    print(text, file=sys.stderr, flush=True)


def digest_of(*things: object) -> str:
    """Ten hex digits that name the inputs of a kept file, so that no stale one is taken for it."""
    digest = hashlib.sha256()
    for thing in things:
        digest.update(thing if isinstance(thing, bytes) else repr(thing).encode())
    return digest.hexdigest()[:10]


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

    @property
    def work(self) -> Path:
        """The folder of everything that can be used again."""
        folder = self.out / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @cached_property
    def sources(self) -> list[SourceFile]:
        """The Python files, found once."""
        return find_sources(self.roots, self.corpus)

    @cached_property
    def target_digest(self) -> str:
        """What the finished target is, in ten hex digits."""
        return digest_of((self.target / "model.safetensors").read_bytes())

    def tokens(self, num_tokens: int, *, heldout: bool) -> np.ndarray:
        """Token stream of the target's tokenizer, uint16 [T], kept in the work folder."""
        path = self.target / "tokenizer.json"
        if not path.is_file():
            raise BuildError(f"{path} is missing; run the stage 'tokenizer' first")
        inputs = digest_of(path.read_bytes(), self.roots, self.corpus, num_tokens)
        name = f"{'heldout' if heldout else 'train'}-{inputs}.bin"
        tokenizer = Tokenizer.from_file(str(path))
        tokens = tokenize(self.sources, tokenizer, num_tokens, self.work / name, heldout=heldout)
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
        texts = training_texts(self.sources, self.corpus.tokenizer_bytes)
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
        source = rows(train, recipe.context)
        picked = np.random.default_rng(self.seed).permutation(len(source))
        source = source[picked[: max(1, recipe.source_tokens // recipe.context)]]
        count = max(1, recipe.sampled_tokens // recipe.context)
        parts = [
            self.text_rows(model, "source", source),
            self.sampled(model, tokenizer, train, "sampled", count, recipe.temperatures)[0],
        ]
        inputs = digest_of(
            self.target_digest, *(part.ids.tobytes() for part in parts), recipe, self.seed
        )
        checkpoint = self.work / f"heads-{inputs}.pt"
        heads = train_heads(model, parts, recipe, checkpoint, seed=self.seed)
        heads = heads.to(torch.bfloat16).float()  # measure what is stored

        figures = self.measured(heads, model, tokenizer)
        report = {
            "base_model_name_or_path": (
                self.target.name if self.target.is_absolute() else self.target.as_posix()
            ),
            **figures,
            "training": asdict(recipe),
        }
        save_heads(self.out / "heads", heads.to(torch.bfloat16), report)
        self.report("heads", report)

    def measured(
        self, heads: MedusaHeads, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, object]:
        """Accuracies of the heads on held-out text, and the tree that suits them."""
        recipe = self.heads_recipe
        heldout = rows(self.tokens(self.corpus.heldout_tokens, heldout=True), recipe.context)
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
        tree, taus = walked_tree(
            [row.numpy() for row in ranks], recipe.tree_draft_tokens, recipe.tree_max_rank
        )
        return {
            "tree": [list(path) for path in tree],
            "tree_tokens_per_step": [round(tau, 4) for tau in taus],  # of every prefix
            "head_accuracies_sampled": accuracies(torch.cat(ranks), recipe.tree_max_rank),
            "head_accuracies_source": accuracies(
                torch.cat(label_ranks(heads, lm_head, text)), recipe.tree_max_rank
            ),
        }

    def text_rows(self, model: PreTrainedModel, name: str, ids: np.ndarray) -> Rows:
        """Source text, labelled at temperature 1."""
        return self.hidden(model, name, ids, np.ones(len(ids)))

    def hidden(
        self, model: PreTrainedModel, name: str, ids: np.ndarray, temperatures: np.ndarray
    ) -> Rows:
        """The target's hidden states of ids [R, L], kept in the work folder."""
        path = self.work / f"{name}-{digest_of(self.target_digest, ids.tobytes())}.hidden"
        return cache_hidden_states(model, ids, temperatures, path)

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
        recipe = self.heads_recipe
        shape = (count, temperatures, recipe.sample_batch, recipe.prompt_tokens, recipe.context)
        inputs = digest_of(self.target_digest, tokens.tobytes(), shape, self.seed)
        path = self.work / f"{name}-{inputs}.npz"
        if not path.exists():
            ids, prompts, at = sample_rows(
                model,
                tokenizer,
                tokens,
                count,
                recipe,
                temperatures=temperatures,
                seed=self.seed + len(name),  # training and held-out rows differ
                label=name,
            )
            with path.with_suffix(".part").open("wb") as part:
                np.savez(part, ids=ids, prompts=prompts, temperatures=at)
            path.with_suffix(".part").replace(path)
        kept = np.load(path)
        return self.hidden(model, name, kept["ids"], kept["temperatures"]), kept["prompts"]

    def report(self, stage: str, figures: dict[str, object]) -> None:
        """Write the stage record, <stage>.json in the work folder, and say the main figures."""
        figures = {
            "seed": self.seed,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **figures,
        }
        (self.work / f"{stage}.json").write_text(json.dumps(figures, indent=2) + "\n")
        for key in ("heldout_loss", "tree_tokens_per_step"):
            if key in figures:
                say(f"{stage}: {key} {figures[key]}")
