"""Ways to make heads for the test target, each on the same prompts and as many tokens.

    python -m benchmarks recipes --out build/recipes

untrained; Medusa-1 on plain source, on text that the target wrote, and there with the target's
distributions for labels; Medusa-2 on that text. All are measured on the same held-out prompts:
accuracy of each head, tokens per verification step in vLLM with one fixed tree (the oracle has to
agree, token for token and step for step), and how far the target is from the original. Nothing in
it is a time, so a busy machine gives the same figures. Interrupted, it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from benchmarks.case import ROOT, Case, Row, attempt
from benchmarks.recipe_measure import Conditions, knowledge, speculation
from benchmarks.recipe_texts import windows, write_plain, write_prompts
from vllm_medusa.files import write_json
from vllm_medusa.heads import save_heads
from vllm_medusa.job import Progress
from vllm_medusa.offline.children import run_in_process
from vllm_medusa.offline.options import BatchOptions
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.offline.records import load_records
from vllm_medusa.options import AtLeastZero, Options, Positive, Seed, option
from vllm_medusa.training.distill import distill
from vllm_medusa.training.medusa1 import new_heads
from vllm_medusa.training.options import (
    DistillOptions,
    HeadOptions,
    JointOptions,
    RecordFiles,
    StepOptions,
    TextFiles,
    TextOptions,
    TrainOptions,
)
from vllm_medusa.training.target import Target
from vllm_medusa.training.train import train
from vllm_medusa.tree import TokenTree

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3], [0, 0, 1], [0, 0, 0, 0]]


class RecipesOptions(Options):
    """What is trained and measured."""

    target: Path = option(default=ROOT / "tests" / "assets" / "target", shown="tests/assets/target")
    out: Path = option("folder for texts and heads")
    prompts: Positive = option("to train on", default=384)
    heldout: Positive = option("prompts held out", default=64)
    tokens: Positive = option("after each prompt", default=64)
    temperature: AtLeastZero = option("of the target's texts", default=0.7)
    heads: Positive = option(default=4)
    epochs: Positive = option(default=4)
    batch_tokens: Positive = option("a step", default=256)
    seed: Seed = option(default=0)


@dataclass(frozen=True)
class Arm:
    """A recipe: the text ("plain", "self-distilled"; "": untrained), labels and method."""

    name: str
    text: str
    labels: Literal["soft", "tokens", ""] = ""
    method: Literal["medusa-1", "medusa-2"] = "medusa-1"


ARMS = (
    Arm("untrained", ""),
    Arm("Medusa-1, plain text", "plain", "tokens"),
    Arm("Medusa-1, self-distilled", "self-distilled", "tokens"),
    Arm("Medusa-1, self-distilled, soft labels", "self-distilled", "soft"),
    Arm("Medusa-2, self-distilled, soft labels", "self-distilled", "soft", "medusa-2"),
)


def run(options: RecipesOptions, progress: Progress) -> Iterator[Row]:
    """A row for each recipe."""
    options.out.mkdir(parents=True, exist_ok=True)
    original = Target.load(options.target)
    files = make_texts(options, AutoTokenizer.from_pretrained(options.target))
    records, _ = load_records(files["heldout"])
    prompts = [
        Prompt(i, r.line, r.request_id, token_ids=r.token_ids[: r.generated[0][0]])
        for i, r in enumerate(records)
    ]
    tree = TokenTree.from_paths(TREE)
    seed = options.seed + 999
    at = Conditions(tree, records, prompts, options.temperature, options.tokens, seed)
    for arm in ARMS:
        what = {"name": arm.name, "text": arm.text, "labels": arm.labels}
        progress.note(arm.name)
        yield attempt(what, lambda w=what, a=arm: _measure(w, a, options, files, original, at))  # type: ignore[misc]


def _measure(
    what: dict[str, Any],
    arm: Arm,
    options: RecipesOptions,
    files: Mapping[str, Path],
    original: Target,
    at: Conditions,
) -> Row:
    """Train and measure, unless that is done; `speculation` raises where the oracle disagrees."""
    target, heads = make_heads(options, arm, files)
    kept = heads / "measured.json"  # a run that was interrupted goes on behind it
    if not kept.exists():
        write_json(kept, knowledge(target, heads, original, at) | speculation(target, heads, at))
    found = json.loads(kept.read_text(encoding="utf-8"))
    numbers = found | {
        "top1": found["accuracy"]["top1"],
        "top5": found["accuracy"]["top5"],
        "kl": found["quality"]["kl"],
        "perplexity": found["quality"]["perplexity_after"],
        "perplexity_before": found["quality"]["perplexity_before"],
    }
    return Row(what, numbers, right=True)


def make_texts(options: RecipesOptions, tokenizer: Any) -> dict[str, Path]:
    """Write both texts of the training prompts and the target's of those held out."""
    out = options.out
    files = {name: out / f"{name}.jsonl" for name in ("plain", "self-distilled", "heldout")}
    some = windows(tokenizer, options.prompts, options.tokens, heldout=False)
    others = windows(tokenizer, options.heldout, options.tokens, heldout=True)
    for name, chosen in (("self-distilled", some), ("heldout", others)):
        prompts = out / f"{name}-prompts.jsonl"
        write_prompts(prompts, chosen)
        asked = DistillOptions(
            model=str(options.target),
            files=RecordFiles(prompts=prompts, output=files[name]),
            sampling=TextOptions(
                temperature=(options.temperature,), max_tokens=options.tokens, seed=options.seed
            ),
            engine=BatchOptions(
                dtype="float32",
                engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
            ),
        )
        run_in_process(distill, asked, log=out / "distill.log")
    write_plain(files["plain"], some, files["self-distilled"])
    return files


def make_heads(options: RecipesOptions, arm: Arm, files: Mapping[str, Path]) -> tuple[Path, Path]:
    """Train, unless that is done; returns the target and the heads to be used together."""
    output = options.out / arm.name.lower().replace(", ", "_").replace(" ", "-")
    if not arm.text:
        if not (output / "config.json").exists():
            target = Target.load(options.target)
            save_heads(output, new_heads(target, options.heads, 1))
        return options.target, output
    joint = arm.method == "medusa-2"  # its last pass over the text is the joint one
    asked = TrainOptions(
        model=str(options.target),
        method=arm.method,
        files=TextFiles(data=files[arm.text], heldout=files["heldout"], output=output),
        heads=HeadOptions(num_heads=options.heads),
        training=StepOptions(
            labels=arm.labels or "tokens",
            epochs=options.epochs - joint,
            batch_tokens=options.batch_tokens,
            seed=options.seed,
        ),
        joint=JointOptions(joint_epochs=1, joint_tokens=512) if joint else JointOptions(),
    )
    run_in_process(train, asked, log=options.out / "train.log")
    merged = output / "target"
    return (merged if merged.is_dir() else options.target), output


CASE = Case(
    RecipesOptions,
    run,
    {
        "name": ("recipe", ""),
        "top1": ("top 1 of each head", ".3f"),
        "top5": ("top 5", ".3f"),
        "tau": ("tau", ".3f"),
        "kl": ("KL to the original, nats", ".4f"),
        "perplexity": ("perplexity", ".3f"),
        "perplexity_before": ("of the original", ".3f"),
        "equal_to_the_oracle": ("texts equal to decode.py's", ""),
    },
    quick={"prompts": 48, "heldout": 16, "epochs": 2},
    bars=("tau", "kl"),
    text=lambda rows: (
        "Medusa-1 does not touch the target. Medusa-2's last epoch is the joint one, so all "
        "recipes make as many passes over as many tokens."
    ),
)
