"""`vllm-medusa tree`: the draft tree that suits calibrated heads, written into their config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vllm_medusa.calibration.options import TreeOptions
from vllm_medusa.cli.command import Command, invocation
from vllm_medusa.cli.console import ConsoleProgress, stdout_console

if TYPE_CHECKING:
    from vllm_medusa.calibration.choose import Chosen

_SKETCHED = 24  # nodes of a tree drawn as text

_DESCRIPTION = """\
Build the tree that gives calibrated heads the most tokens per verification step for a number of
draft nodes, and write it into their config.json, best nodes first. "tree": "heads" serves it, and
with a smaller num_speculative_tokens its best part; without that, trees are dynamic."""

_EPILOG = """\
walk (default) walks the calibration's texts as decoding would, so it knows that a head is less
often right after its predecessor's second choice. independence is the search of the Medusa paper,
which multiplies the heads' average accuracies. Both print what they expect (tau, tokens per step);
"held out" is the tree of the same size built from one half of the prompts, walked on the other."""


def run(options: TreeOptions, progress: ConsoleProgress) -> int:
    """Choose a tree and print what is known of it; the status is 1 if none pays."""
    from vllm_medusa.calibration.budgets import usual_sizes
    from vllm_medusa.calibration.choose import choose_tree
    from vllm_medusa.calibration.sketch import sketch_tree

    chosen = choose_tree(options, progress, invocation())
    out = stdout_console()
    found = {len(each.paths) for each in chosen.curves.values()}  # may be fewer than asked for
    _print_curves(out, chosen, sorted({*usual_sizes(max(found)), *found}))
    if not chosen.size:
        out.print(
            "At these step costs no tree is faster than plain decoding: serve without speculation, "
            "or measure the costs again. The heads' config is as it was.",
            soft_wrap=True,
        )
        return 1
    if chosen.cost is not None:
        out.print(
            f"{chosen.size} draft nodes give most tokens per time: {chosen.gain:.2f} times plain "
            "decoding's",
            soft_wrap=True,
        )
    error = chosen.walked.standard_error
    if not math.isnan(error):
        out.print(
            f"{chosen.size} nodes: tau {chosen.walked.tau:.3f} +- {error:.3f} (standard error over "
            f"{len(chosen.walked.steps)} prompts): expect so much difference on others like them.",
            soft_wrap=True,
        )
    more = "" if chosen.size <= _SKETCHED else f" (the best {_SKETCHED} of {chosen.size})"
    out.print(
        f"\nchoices of the heads, and the share of steps that accept them{more}:", soft_wrap=True
    )
    sketch = sketch_tree(chosen.paths[:_SKETCHED], chosen.chances)
    out.print("\n".join(sketch), markup=False)
    if chosen.measured:
        _print_measured(out, chosen)
    if options.draw:
        out.print(f"picture: {options.draw}", soft_wrap=True)
    if options.output:
        out.print(f"tree: {options.output}", soft_wrap=True)
    if options.dry_run:
        out.print("dry run: the heads' config is as it was")
    else:
        config = options.heads / "config.json"
        out.print(f'{config} has the tree; "tree": "heads" serves it', soft_wrap=True)
    return 0


def _print_curves(out: Console, chosen: Chosen, sizes: Sequence[int]) -> None:
    """What trees of ``sizes`` are worth, by both algorithms; speed is of the chosen one's."""
    from vllm_medusa.calibration.choose import origin

    out.print(
        f"Expected tokens per step (tau), from {origin(chosen.observations)}: on the texts the "
        "tree was built from, on prompts held out, and as if heads were independent.",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    table.add_column("nodes", justify="right")
    for name in chosen.curves:
        for column in (f"{name}: tau", "held out", "if indep."):
            table.add_column(column, justify="right", no_wrap=True)
    cost, expected = (
        chosen.cost,
        dict(zip(chosen.curve.sizes, chosen.curve.expected(), strict=True)),
    )
    if cost:
        table.add_column("x plain", justify="right")
    for size in sizes:
        row = [str(size)]
        for curve in chosen.curves.values():
            if size in curve.sizes:
                at = curve.sizes.index(size)
                estimates = (curve.walked[at], curve.heldout[at], curve.independent[at])
                row += [_tau(estimate) for estimate in estimates]
            else:
                row += ["", "", ""]
        if cost and size in expected and size <= max(cost.times):
            row.append(f"{cost.speedup(size, expected[size]):.2f}")
        table.add_row(*row)
    out.print(table)
    if chosen.curve.heldout[-1] is None:
        out.print("All texts are of one prompt: nothing could be held out.", style="yellow")


def _print_measured(out: Console, chosen: Chosen) -> None:
    """What decoding gave, and how far each estimate was from it."""
    out.print("\nMeasured by decoding the prompts, lossless; how far the estimates were off:")
    table = Table(box=None, header_style="bold")
    for name in ("nodes", "steps", "measured", "+-", "expected", "held out", "if indep."):
        table.add_column(name, justify="right", no_wrap=True)
    curve = chosen.curve
    for size, result in chosen.measured.items():
        at = curve.sizes.index(size)
        estimates = (curve.walked[at], curve.heldout[at], curve.independent[at])
        table.add_row(
            str(size),
            str(sum(result.steps)),
            _tau(result.tau),
            _tau(result.standard_error),
            *(_estimate(value, result.tau) for value in estimates),
        )
    out.print(table)
    if without := [str(n) for n, result in chosen.measured.items() if not sum(result.steps)]:
        out.print(
            f"No verification step was taken with {', '.join(without)} nodes: every text ended "
            "with its first token. Measure longer ones (--max-tokens, other prompts).",
            style="yellow",
            soft_wrap=True,
        )


def _estimate(value: float | None, tau: float) -> str:
    """An estimate, and how far it was from what was measured, if that was."""
    off = "" if value is None or math.isnan(tau) else f" ({100 * (value / tau - 1):+.1f} %)"
    return f"{_tau(value)}{off}"


def _tau(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


COMMAND = Command(
    "tree",
    "build the tree that suits calibrated heads",
    TreeOptions,
    run,
    _DESCRIPTION,
    _EPILOG,
)
