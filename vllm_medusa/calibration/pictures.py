"""A picture of a tree (matplotlib), written as PNG, SVG or PDF by suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_medusa.calibration import CalibrationError
from vllm_medusa.files import new_path, require_parent
from vllm_medusa.tree.topology import Path as TreePath

SUFFIXES = (".png", ".svg", ".pdf")
_FAINTEST = 1e-3  # smaller probabilities look the same


def check_picture(path: Path) -> None:
    """Refuse an invalid picture file before expensive work starts."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CalibrationError(
            f"{path}: pictures need matplotlib; pip install 'vllm-medusa[train]'."
        ) from None
    if path.is_dir():
        raise CalibrationError(f"{path} is a folder: choose another file for the picture.")
    if path.suffix.lower() not in SUFFIXES:
        raise CalibrationError(
            f"{path}: the suffix {path.suffix!r} is not a supported picture format; use "
            f"{', '.join(SUFFIXES)}."
        )
    require_parent(path)


def draw_tree(
    path: Path, paths: Sequence[TreePath], chances: Mapping[TreePath, float], title: str
) -> None:
    """A tree from the root down; size and color of a node show the probability of reaching it.

    ``chances`` has every node; the root's is 1.
    """
    places = _layout(paths)
    depth = max(len(node) for node in places)
    across = max(x for x, _ in places.values())
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    size = max(7.0, 0.34 * across + 2.5), 1.55 * depth + 1.9
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    behind = {"boxstyle": "round,pad=0.05", "fc": "white", "ec": "none", "alpha": 0.85}
    for node, (x, y) in places.items():
        share = 100 * chances[node]
        text = f"{node[-1]}\n{share:.{0 if share > 10 else 1}f}" if node else "root"
        axis.annotate(text, (x, y - 0.17), ha="center", va="top", fontsize=7.5, bbox=behind)
        if node:
            above = places[node[:-1]]
            axis.plot([above[0], x], [above[1], y], color="0.7", lw=1, zorder=1)
    nodes = sorted(places, key=lambda node: chances[node])  # likely nodes on top
    values = [max(_FAINTEST, chances[node]) for node in nodes]
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
    axis.set_title(title, fontsize=11)
    axis.set_yticks(range(-depth, 1))
    axis.set_yticklabels([*(f"head {level}" for level in range(depth - 1, -1, -1)), ""])
    axis.set_xticks([])
    axis.set_xlim(-1, across + 1)
    axis.set_ylim(-depth - 0.65, 0.45)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    bar = figure.colorbar(drawn, ax=axis, pad=0.01, fraction=0.03)
    bar.set_ticks([0.001, 0.01, 0.1, 1], labels=["0.1 %", "1 %", "10 %", "100 %"])
    axis.set_xlabel(
        "below a node: choice of the head, 0 = best; % of steps that accept the node (color)",
        fontsize=9,
    )
    with new_path(path) as part:
        figure.savefig(part, dpi=130, format=path.suffix[1:].lower())


def _layout(paths: Sequence[TreePath]) -> dict[TreePath, tuple[float, float]]:
    """Layout: leaves side by side, parents centered above their children, depth downwards."""
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
