"""Pictures of a calibration and of a tree (matplotlib), written as PNG, SVG or PDF by suffix."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.calibration.accuracy import Accuracy
from vllm_medusa.calibration.confidence import reliability
from vllm_medusa.calibration.observations import NO_LABEL, Observations
from vllm_medusa.files import new_path, require_parent
from vllm_medusa.tree.topology import Path as TreePath

SUFFIXES = (".png", ".svg", ".pdf")
_STARTS = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
_AUTHOR = b"Matplotlib"  # it signs what it draws
_LARGEST = 1 << 26  # bytes, far more than a picture drawn here
_FAINTEST = 1e-3  # chances below look alike


def check_picture(path: Path) -> None:
    """Refuse a file that no picture may be written to, before anything expensive starts."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CalibrationError(
            f"{path}: pictures need matplotlib; pip install 'vllm-medusa[train]'."
        ) from None
    if path.is_dir():
        raise CalibrationError(f"{path} is a folder: name another file for the picture.")
    if path.suffix.lower() not in SUFFIXES:
        raise CalibrationError(
            f"{path}: the suffix {path.suffix!r} is not a kind of picture known here; use "
            f"{', '.join(SUFFIXES)}."
        )
    require_parent(path)
    if os.path.lexists(path) and not _drawn(path):
        raise CalibrationError(
            f"{path} exists and is not a {path.suffix} picture drawn by matplotlib, so it is not "
            "replaced: name another file, or remove it yourself."
        )


def _drawn(path: Path) -> bool:
    """Whether a file may be drawn anew: a picture that was drawn here, or an empty file."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    content = path.read_bytes()
    return not content or (content.startswith(_STARTS[path.suffix.lower()]) and _AUTHOR in content)


def draw_calibration(path: Path, observations: Observations, accuracy: Accuracy) -> None:
    """Accuracy by rank; the next head on the spine and off it; reliability of the best token."""
    figure = _figure(16, 5)
    ranks_axis, branch_axis, reliable_axis = figure.subplots(1, 3)
    num_heads, width = accuracy.overall.shape
    for head in range(num_heads):
        label = f"head {head}"
        ranks_axis.semilogy(range(width), accuracy.overall[head], "o-", ms=4, label=label)
        known = observations.ranks[:, head] != NO_LABEL
        right = observations.ranks[known, head] == 0
        bins = reliability(observations.confidences[known, head, 0].astype(np.float64), right)
        enough = bins.count >= max(20, 0.0005 * known.sum())
        label = f"{label}, ECE {100 * bins.ece:.1f} %"
        reliable_axis.plot(bins.confidence[enough], bins.right[enough], "o-", ms=4, label=label)
    ranks_axis.set(
        title="How often each choice is right", xlabel="choice (0 = best)", ylabel="share"
    )
    ranks_axis.set_xticks(range(width))
    heads = np.arange(1, num_heads)
    bars = (
        ("everywhere", accuracy.overall, "0.75"),
        ("after the best choices", accuracy.walked_spine, "tab:blue"),
        ("after another choice", accuracy.walked_sibling, "tab:orange"),
    )
    for place, (label, table, color) in enumerate(bars):
        branch_axis.bar(
            heads + 0.27 * (place - 1), np.nan_to_num(table[1:, 0]), 0.25, label=label, color=color
        )
    branch_axis.set(title="Best choice right, where decoding asks", xlabel="head", ylabel="share")
    branch_axis.set_xticks(heads)
    reliable_axis.plot([0, 1], [0, 1], "k:", lw=1)
    reliable_axis.set(
        title="Best choice: confidence and truth", xlabel="mean confidence", ylabel="share right"
    )
    for axis in (ranks_axis, branch_axis, reliable_axis):
        axis.legend(fontsize=8, frameon=False)
        axis.grid(alpha=0.25)
    _save(figure, path)


def draw_tree(
    path: Path, paths: Sequence[TreePath], chances: Mapping[TreePath, float], title: str
) -> None:
    """A tree from the root down; the chance that a step reaches a node is its size and colour.

    Edges carry the rank of the choice. ``chances`` has every node, the root's is 1.
    """
    places = _layout(paths)
    depth = max(len(node) for node in places)
    across = max(x for x, _ in places.values())
    figure = _figure(max(7.0, 0.34 * across + 2.5), 1.55 * depth + 1.9)
    axis = figure.subplots()
    from matplotlib.colors import LogNorm

    nodes = sorted(places, key=lambda node: chances[node])  # the likely ones on top
    values = [max(_FAINTEST, chances[node]) for node in nodes]
    for node, (x, y) in places.items():
        if node:
            above = places[node[:-1]]
            axis.plot([above[0], x], [above[1], y], color="0.7", lw=1, zorder=1)
            axis.annotate(
                str(node[-1]),
                (0.3 * above[0] + 0.7 * x, 0.3 * above[1] + 0.7 * y),
                ha="center",
                va="center",
                fontsize=8,
                color="0.3",
                bbox={"boxstyle": "circle,pad=0.1", "fc": "white", "ec": "none"},
                zorder=2,
            )
    drawn = axis.scatter(
        [places[node][0] for node in nodes],
        [places[node][1] for node in nodes],
        s=[60 + 500 * value**0.5 for value in values],
        c=values,
        cmap="YlGnBu",
        norm=LogNorm(_FAINTEST, 1),
        edgecolors="0.35",
        linewidths=0.6,
        zorder=3,
    )
    for node, (x, y) in places.items():
        text = "root" if not node else f"{100 * chances[node]:.{0 if chances[node] > 0.1 else 1}f}"
        behind = {"boxstyle": "round,pad=0.05", "fc": "white", "ec": "none", "alpha": 0.85}
        axis.annotate(
            text, (x, y - 0.17), ha="center", va="top", fontsize=7.5, zorder=4, bbox=behind
        )
    axis.set_title(title, fontsize=11)
    axis.set_yticks(range(-depth, 1))
    axis.set_yticklabels([*(f"head {level}" for level in range(depth - 1, -1, -1)), ""])
    axis.set_xticks([])
    axis.set_xlim(-1, across + 1)
    axis.set_ylim(-depth - 0.55, 0.45)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    bar = figure.colorbar(drawn, ax=axis, pad=0.01, fraction=0.03)
    bar.set_ticks([0.001, 0.01, 0.1, 1], labels=["0.1 %", "1 %", "10 %", "100 %"])
    axis.set_xlabel(
        "on the edges: which choice of the head, 0 = best; colour and number: % of steps that "
        "accept the node",
        fontsize=9,
    )
    _save(figure, path)


def _layout(paths: Sequence[TreePath]) -> dict[TreePath, tuple[float, float]]:
    """Leaves side by side, parents above the middle of their children, depth downwards."""
    children: dict[TreePath, list[TreePath]] = {(): []}
    for node in sorted(map(tuple, paths)):
        children[node] = []
        children[node[:-1]].append(node)
    places: dict[TreePath, tuple[float, float]] = {}
    leaves = 0
    for node in sorted(children, key=lambda node: (*node, float("inf"))):  # children first
        if below := children[node]:
            x = (places[below[0]][0] + places[below[-1]][0]) / 2
        else:
            x, leaves = float(leaves), leaves + 1
        places[node] = (x, -float(len(node)))
    return places


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with new_path(path) as part:
        figure.savefig(part, dpi=130, format=path.suffix[1:].lower())
