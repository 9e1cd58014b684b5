"""Plots of adapt's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_accuracies(document: dict[str, Any], path: Path) -> None:
    """Each head's held-out accuracy by the number of its guesses, one curve a head."""
    heldout = (document["training"] or {}).get("heldout") or {"top": []}
    figure, axes = _figure()
    for head, top in enumerate(heldout["top"]):
        axes.plot(range(1, len(top) + 1), top, "o-", markersize=3, label=f"head {head}")
    axes.set(
        xlabel="guesses", ylabel="share of labels among them", ylim=(0, 1), title="held-out text"
    )
    if heldout["top"]:
        axes.legend()
    _save(figure, path)


def draw_budgets(document: dict[str, Any], path: Path) -> None:
    """Ratio of throughputs (its bar from the worst to the best round) and tau by tree size."""
    rows = document["measured"]["rows"]
    sizes = [row["num_draft_tokens"] for row in rows]
    ratios = [row["ratio"] for row in rows]
    errors = [
        [row["ratio"] - min(row["ratios"]) for row in rows],
        [max(row["ratios"]) - row["ratio"] for row in rows],
    ]
    figure, axes = _figure()
    axes.errorbar(sizes, ratios, yerr=errors, fmt="s-", capsize=3, label="throughput / plain's")
    axes.plot(sizes, [row["tau"] or 1 for row in rows], "o-", label="tau, measured")
    expected = [document["expected"][str(size)] for size in sizes]
    known = [(size, tau) for size, tau in zip(sizes, expected, strict=True) if tau is not None]
    if known:
        axes.plot(*zip(*known, strict=True), "x", color="0.3", label="tau, expected")
    axes.axhline(1, color="0.5", linewidth=1)
    if automatic := document["measured"].get("automatic"):
        axes.axhline(automatic["ratio"], color="C3", linestyle="--", label="throughput, automatic")
    axes.set(xlabel="draft nodes", title=f"beside plain vLLM, {document['measured']['dtype']}")
    axes.legend()
    _save(figure, path)


def _figure() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 4))
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
