"""A plot of a run's log: losses and accuracies over the steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_medusa.files import new_path

_POINTS = 50  # points per curve


def draw_curves(entries: Iterable[dict[str, Any]], path: Path, title: str = "") -> None:
    """Plot ``log.jsonl``'s entries as PNG (matplotlib); for Medusa-2 also the degradation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = list(entries)
    steps = [line for line in lines if "losses" in line]
    measured = [line for line in lines if "heldout" in line]
    kept = [line for line in measured if "quality" in line]
    count = 3 if kept else 2
    figure, (left, right, *more) = plt.subplots(1, count, figsize=(5.5 * count, 4))
    losses = np.array([line["losses"] for line in steps])  # [S, K]
    parts = np.array_split(np.arange(len(steps)), min(len(steps), _POINTS))
    heads = [f"head {head}" for head in range(losses.shape[1])]
    at = [steps[part[-1]]["step"] for part in parts]
    left.plot(at, [losses[part].mean(0) for part in parts], linewidth=1, label=heads)
    if measured:
        at = [line["step"] for line in measured]
        left.set_prop_cycle(None)
        left.plot(at, [line["heldout"]["loss"] for line in measured], "o", markersize=3)
        top = np.array([line["heldout"]["top"] for line in measured])  # [M, K, ranks]
        for rank, style in ((1, "o-"), (5, "s:")):
            right.set_prop_cycle(None)
            names = [f"{head}, top {rank}" for head in heads]
            right.plot(at, top[:, :, rank - 1], style, markersize=3, label=names)
        right.legend(fontsize=8)
    left.set(xlabel="step", ylabel="loss, nats (dots: held out)", title="loss")
    left.legend(fontsize=8)
    right.set(xlabel="step", ylabel="fraction of labels", title="held-out accuracy", ylim=(0, 1))
    for axes in more:
        lost = [(q["kl"], q["perplexity_ratio"] - 1) for q in (line["quality"] for line in kept)]
        names = ["KL(original || new), nats per token", "perplexity after / before - 1"]
        axes.plot([line["step"] for line in kept], lost, "o-", markersize=3, label=names)
        axes.set(xlabel="step", title="degradation of the target, held out")
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    with new_path(path) as part:
        figure.savefig(part, format="png", dpi=110)
    plt.close(figure)
