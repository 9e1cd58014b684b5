"""The comparison of recipes as a table and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def line(row: dict[str, Any]) -> str:
    """One recipe's figures in a line."""
    top1 = " ".join(f"{share:.3f}" for share in row["accuracy"]["top1"])
    return f"{row['recipe']}: top 1 {top1}; tau {row['tau']:.3f}; KL {row['quality']['kl']:.2g}"


def markdown(document: dict[str, Any]) -> str:
    """The table, under what it was measured with."""
    machine, setting = document["machine"], document["setting"]
    tokens = setting["train_tokens"]
    lines = [
        f"Demo target, float32. {setting['train_prompts']} prompts to train on, cut out of the "
        f"standard library, and after them {tokens['plain']} tokens of the library itself (plain) "
        f"or {tokens['self-distilled']} of the target's at temperature "
        f"{setting['temperature']:g} (self-distilled); {setting['heads']} heads of one layer, "
        f"{setting['epochs']} epochs in steps of {setting['batch_tokens']} tokens, seed "
        f"{setting['seed']}. Measured on the target's texts for "
        f"{setting['heldout_prompts']} prompts of other files. tau: tokens per verification step "
        f"in vLLM {machine['vllm']}, seeded sampling at the same temperature, "
        f"{setting['tokens']} tokens each, one tree of {len(setting['tree'])} draft nodes for all; "
        "every token and every step's accepted drafts are those of `decode.py`.",
        "",
        f"Command: `{document['command']}` (Python {machine['python']}, torch {machine['torch']}, "
        f"commit {machine['commit']}{' with changes' if machine['uncommitted_changes'] else ''})",
        "",
    ]
    heads = setting["heads"]
    columns = ["recipe", *(f"head {h}: top 1 / 5" for h in range(heads)), "tau"]
    columns += ["KL to the original, nats", "perplexity (original)"]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in document["rows"]:
        accuracy, quality = row["accuracy"], row["quality"]
        cells = [row["recipe"]]
        cells += [f"{accuracy['top1'][h]:.3f} / {accuracy['top5'][h]:.3f}" for h in range(heads)]
        cells += [f"**{row['tau']:.3f}**", f"{quality['kl']:.4f}"]
        before, after = quality["perplexity_before"], quality["perplexity_after"]
        cells.append(f"{after:.3f} ({before:.3f})")
        lines.append(f"| {' | '.join(cells)} |")
    labels = max(document["rows"][0]["labels"])
    lines += [
        "",
        f"Accuracies over {labels} labels (a standard error of at most "
        f"{0.5 / labels**0.5:.3f}); Medusa-1 does not touch the target. Medusa-2's last epoch is "
        "the joint one, so all recipes make as many passes over as many tokens.",
    ]
    return "\n".join(lines) + "\n"


def plot(document: dict[str, Any], path: Path) -> None:
    """Top-1 accuracy by head and tau, recipe by recipe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = document["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for row in rows:
        top1 = row["accuracy"]["top1"]
        left.plot(range(len(top1)), top1, "o-", markersize=4, label=row["recipe"])
    left.set(xlabel="head", ylabel="top-1 accuracy, held out", xticks=range(len(top1)))
    left.legend(fontsize=8)
    left.grid(alpha=0.3)
    names = [row["recipe"].replace(", ", ",\n") for row in rows]
    right.barh(names[::-1], [row["tau"] for row in rows][::-1])
    right.set(xlabel="tokens per verification step (tau)", xlim=(1, None))
    right.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
