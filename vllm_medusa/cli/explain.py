"""`vllm-medusa explain`: what measured step costs would choose at which load."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_medusa.cli.command import Command
from vllm_medusa.cli.console import ConsoleProgress, stdout_console
from vllm_medusa.explain.options import ExplainOptions

if TYPE_CHECKING:
    from vllm_medusa.explain.job import Explanation

_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

_DESCRIPTION = """\
Tell what "budget": "auto" would do: what a step of this target costs by its rows, as engines on
this machine have measured it, and how many draft nodes that makes worth verifying at which load.
Only --measure starts an engine."""

_EPILOG = """\
What nodes bring is what the heads' calibration says (`vllm-medusa calibrate`, then `tree`); while
it serves, the budget goes by what is really accepted, and goes on measuring."""


def run(options: ExplainOptions, progress: ConsoleProgress) -> int:
    """Look the costs up and print what follows."""
    from vllm_medusa.explain.job import explain, in_words

    found = explain(options)
    out, kept = stdout_console(), found.kept
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.written))
    out.print(
        f"Step costs of {options.target} with {options.heads}: {in_words(kept)}; learned from "
        f"{kept.cost.steps} steps, the last {when}. Sizes that no step had are guessed from their "
        "neighbours.",
        soft_wrap=True,
        markup=False,
    )
    for other in found.others:
        out.print(f"also kept: {in_words(other)}", soft_wrap=True, markup=False)
    _print_costs(out, found)
    _print_loads(out, found)
    if not found.calibrated:
        out.print(
            "The heads' config doesn't say what their nodes bring, so the usual was taken: "
            "calibrate them, then build their tree.",
            style="yellow",
            soft_wrap=True,
        )
    if options.plot:
        out.print(f"picture: {options.plot}", soft_wrap=True)
    return 0


def _print_costs(out: Console, found: Explanation) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column("ms of a step; rows:")
    shown = [found.rows.index(n) for n in _SHOWN_ROWS if n in found.rows]
    for place in shown:
        table.add_column(str(found.rows[place]), justify="right", no_wrap=True)
    for name, times in (
        ("plain, a row each request", found.plain_ms),
        ("one request's tree and the heads", found.tree_ms),
    ):
        table.add_row(name, *(f"{times[place]:.1f}" for place in shown))
    out.print(table)


def _print_loads(out: Console, found: Explanation) -> None:
    table = Table(box=None, header_style="bold")
    columns = ("requests", "plain ms", "nodes", "a request", "ms", "tokens a step", "x plain", "")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for load in found.loads:
        chosen = (
            str(load.nodes),
            f"{load.nodes / load.requests:.1f}",
            f"{load.ms:.1f}",
            f"{load.tokens:.1f}",
        )
        table.add_row(
            str(load.requests),
            f"{load.plain_ms:.1f}",
            *(chosen if load.pays else ["-"] * len(chosen)),
            f"{load.ratio if load.pays else 1.0:.2f}",
            "" if load.pays else f"plain decoding; drafts: {load.ratio:.2f}",
        )
    out.print(table)


COMMAND = Command(
    "explain",
    "what measured step costs would choose at which load",
    ExplainOptions,
    run,
    _DESCRIPTION,
    _EPILOG,
    engine=True,
)
