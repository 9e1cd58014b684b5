"""Ways to make heads for the demo target, each on the same prompts and as many tokens.

    python -m benchmarks.recipes --out build/recipes

untrained; Medusa-1 on plain source, on text that the target wrote, and there with the target's
distributions for labels; Medusa-2 on that text. All are measured on the same held-out prompts:
accuracy of each head, tokens per verification step in vLLM with one fixed tree (the oracle has to
agree, token for token and step for step), and how far the target is from the original. Nothing in
it is a time, so a busy machine gives the same figures. Texts and heads are made by the commands
`vllm-medusa distill` and `vllm-medusa train`, as anyone would; interrupted, it goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import recipe_report as report
from benchmarks.recipe_measure import Conditions, knowledge, speculation
from benchmarks.recipe_texts import generated_tokens, windows, write_plain, write_prompts
from benchmarks.report import ROOT, describe_machine, write_json
from vllm_medusa.heads import save_heads
from vllm_medusa.offline.prompts import Prompt
from vllm_medusa.training.initial_heads import new_heads
from vllm_medusa.training.records import load_records
from vllm_medusa.training.target import Target
from vllm_medusa.tree import TokenTree

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3], [0, 0, 1], [0, 0, 0, 0]]


@dataclass(frozen=True)
class Arm:
    """A recipe: the text, and `train`'s options."""

    name: str
    text: str  # "plain" or "self-distilled"; "": untrained
    options: tuple[str, ...] = field(default_factory=tuple)


ARMS = (
    Arm("untrained", ""),
    Arm("Medusa-1, plain text", "plain", ("--labels", "tokens")),
    Arm("Medusa-1, self-distilled", "self-distilled", ("--labels", "tokens")),
    Arm("Medusa-1, self-distilled, soft labels", "self-distilled", ("--labels", "soft")),
    Arm(
        "Medusa-2, self-distilled, soft labels",
        "self-distilled",
        (
            "--labels",
            "soft",
            "--method",
            "medusa-2",
            "--joint-epochs",
            "1",
            "--joint-tokens",
            "512",
        ),
    ),
)


def vllm_medusa(*arguments: str) -> None:
    """Run a command of the package; ends the program if it fails."""
    print("vllm-medusa", *arguments, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "vllm_medusa.cli", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def make_texts(args: argparse.Namespace, tokenizer: Any) -> dict[str, Path]:
    """Write both texts of the training prompts and the target's of those held out."""
    files = {name: args.out / f"{name}.jsonl" for name in ("plain", "self-distilled", "heldout")}
    some = windows(tokenizer, args.prompts, args.tokens, heldout=False)
    others = windows(tokenizer, args.heldout, args.tokens, heldout=True)
    for name, chosen in (("self-distilled", some), ("heldout", others)):
        prompts = args.out / f"{name}-prompts.jsonl"
        write_prompts(prompts, chosen)
        vllm_medusa(
            *("distill", str(args.target), "--prompts", str(prompts)),
            *("--output", str(files[name]), "--temperature", str(args.temperature)),
            *("--max-tokens", str(args.tokens), "--seed", str(args.seed), "--dtype", "float32"),
            *("--engine-args", '{"enforce_eager": true, "kv_cache_memory_bytes": 268435456}'),
        )
    write_plain(files["plain"], some, files["self-distilled"])
    return files


def make_heads(args: argparse.Namespace, arm: Arm, files: dict[str, Path]) -> tuple[Path, Path]:
    """Train, unless that is done; returns the target and the heads to be used together."""
    output: Path = args.out / arm.name.lower().replace(", ", "_").replace(" ", "-")
    if not arm.text:
        if not (output / "config.json").exists():
            target = Target.load(args.target)
            save_heads(output, new_heads(target, args.heads, 1))
        return args.target, output
    joint = "medusa-2" in arm.options  # its last pass over the text is the joint one
    epochs = args.epochs - joint
    vllm_medusa(
        *("train", str(args.target), "--data", str(files[arm.text])),
        *("--heldout", str(files["heldout"]), "--output", str(output)),
        *("--num-heads", str(args.heads), "--epochs", str(epochs), "--seed", str(args.seed)),
        *("--batch-tokens", str(args.batch_tokens)),
        *arm.options,
    )
    merged = output / "target"
    return (merged if merged.is_dir() else args.target), output


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=ROOT / "demo" / "target")
    parser.add_argument("--out", type=Path, required=True, help="folder for texts and heads")
    parser.add_argument("--results", type=Path, help="folder for recipes.json, .md, .png (OUT)")
    parser.add_argument("--prompts", type=int, default=384, help="to train on (384)")
    parser.add_argument("--heldout", type=int, default=64, help="prompts held out (64)")
    parser.add_argument("--tokens", type=int, default=64, help="after each prompt (64)")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=256, help="a step (256)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.results or args.out
    original = Target.load(args.target)
    files = make_texts(args, original.tokenizer)
    records, _ = load_records(files["heldout"])
    prompts = [
        Prompt(i, r.line, r.request_id, token_ids=r.token_ids[: r.generated[0][0]])
        for i, r in enumerate(records)
    ]
    at = Conditions(
        TokenTree.from_paths(TREE), records, prompts, args.temperature, args.tokens, args.seed + 999
    )
    document: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.recipes", *sys.argv[1:]]),
        "machine": describe_machine(),
        "setting": {
            **{
                n: getattr(args, n)
                for n in ("temperature", "heads", "epochs", "batch_tokens", "seed", "tokens")
            },
            "target": args.target.name,
            "train_prompts": args.prompts,
            "heldout_prompts": len(records),
            "train_tokens": {
                name: generated_tokens(load_records(files[name])[0])
                for name in ("plain", "self-distilled")
            },
            "tree": TREE,
        },
        "rows": [],
    }
    for arm in ARMS:
        target, heads = make_heads(args, arm, files)
        kept = heads / "measured.json"  # a run that was interrupted goes on behind it
        if not kept.exists():
            row: dict[str, Any] = {"recipe": arm.name, "text": arm.text, "options": [*arm.options]}
            row |= knowledge(target, heads, original, at) | speculation(target, heads, at)
            write_json(kept, row)
        document["rows"].append(row := json.loads(kept.read_text()))
        print(report.line(row), file=sys.stderr, flush=True)
    write_json(results / "recipes.json", document)
    (results / "recipes.md").write_text(report.markdown(document))
    report.plot(document, results / "recipes.png")
    print(report.markdown(document))


if __name__ == "__main__":
    main()
