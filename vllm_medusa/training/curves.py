"""A run's log as a picture: losses and accuracies over the steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_medusa.files import new_path

_SMOOTHED = 50  # points of a curve


def draw_curves(entries: Iterable[dict[str, Any]], path: Path, title: str = "") -> None:
    """Draw ``log.jsonl``'s entries to a PNG file (matplotlib); of Medusa-2 what was lost, too."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = list(entries)
    steps = [line for line in lines if "losses" in line]
    measured = [line for line in lines if "heldout" in line]
    kept = [line for line in measured if "quality" in line]
    count = 3 if kept else 2
    figure, (left, right, *more) = plt.subplots(1, count, figsize=(5.5 * count, 4))
    num_heads = len(steps[0]["losses"]) if steps else 0
    width = max(1, len(steps) // _SMOOTHED)
    windows = [steps[i : i + width] for i in range(0, len(steps), width)]
    for head in range(num_heads):
        at = [window[-1]["step"] for window in windows]
        mean = [sum(line["losses"][head] for line in w) / len(w) for w in windows]
        (curve,) = left.plot(at, mean, linewidth=1, label=f"head {head}")
        at = [line["step"] for line in measured]
        color = curve.get_color()
        losses = [line["heldout"]["loss"][head] for line in measured]
        left.plot(at, losses, "o", markersize=3, color=color)
        for rank, style in ((1, "-"), (5, ":")):
            share = [line["heldout"]["top"][head][rank - 1] for line in measured]
            name = f"head {head}, top {rank}" if head == 0 else None
            right.plot(at, share, style, marker="o", markersize=3, color=color, label=name)
    left.set(xlabel="step", ylabel="loss, nats (dots: held out)", title="loss")
    right.set(xlabel="step", ylabel="share of labels", title="held-out accuracy", ylim=(0, 1))
    for axes in more:
        at = [line["step"] for line in kept]
        kl = [line["quality"]["kl"] for line in kept]
        axes.plot(at, kl, marker="o", markersize=3, label="KL(original || new), nats a token")
        ratio = [line["quality"]["perplexity_ratio"] - 1 for line in kept]
        axes.plot(at, ratio, ":", marker="o", markersize=3, label="perplexity after / before - 1")
        axes.set(xlabel="step", title="what the target lost, held out")
    for axes in (left, right, *more):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    with new_path(path) as part:
        figure.savefig(part, format="png", dpi=110)
    plt.close(figure)
