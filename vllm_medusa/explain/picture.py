"""A picture of what steps cost and of what follows from it (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_medusa.files import new_path

if TYPE_CHECKING:
    from vllm_medusa.explain.job import Explanation


def draw_explanation(path: Path, found: Explanation) -> None:
    """Step times by rows; nodes of a request and the ratio to plain vLLM by requests."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    times.plot(found.rows, found.plain_ms, label="plain, a row each request")
    times.plot(found.rows, found.tree_ms, label="one request's tree and the heads")
    times.set(xlabel="rows of a step", ylabel="ms", ylim=(0, None), title="what a step costs")
    times.legend(frameon=False)
    requests = [load.requests for load in found.loads]
    ratios.axhline(1, color="0.5", linewidth=1)
    ratios.plot(requests, [load.ratio for load in found.loads], "s-", label="expected / plain")
    ratios.set_xscale("log", base=2)
    ratios.set_xticks(requests, [str(n) for n in requests])
    ratios.set(xlabel="requests", ylabel="expected speed / plain", title="what follows from it")
    nodes = ratios.twinx()
    each = [load.nodes / load.requests if load.pays else 0.0 for load in found.loads]
    nodes.plot(requests, each, "o:", color="tab:orange")
    nodes.set_ylim(0, 1.1 * max(1.0, *each))
    nodes.set_ylabel("draft nodes a request", color="tab:orange")
    for axis in (times, ratios):
        axis.grid(alpha=0.25)
    with new_path(path) as part:
        figure.savefig(part, dpi=130, format=path.suffix[1:].lower())
