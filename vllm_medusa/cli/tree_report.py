"""What `vllm-medusa tree` tells on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_medusa.calibration.budgets import Curve, StepCost
    from vllm_medusa.calibration.measured import Measured
    from vllm_medusa.calibration.observations import Observations


def origin(observations: Observations) -> str:
    """What the calibration was made of."""
    temperature = observations.temperature()
    wrote = "text not by the target" if temperature is None else f"T = {temperature:g}"
    return f"{len(observations.ranks)} positions, {wrote}"


def print_curves(
    out: Console,
    curves: dict[str, Curve],
    chosen: Curve,
    sizes: Sequence[int],
    cost: StepCost | None,
    observations: Observations,
) -> None:
    """What trees of ``sizes`` are worth, by both algorithms; speed is of the chosen one's."""
    out.print(
        f"Expected tokens per step (tau), from {origin(observations)}: on the texts the tree was "
        "built from, on prompts held out, and as if heads were independent.",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    table.add_column("nodes", justify="right")
    for name in curves:
        for column in (f"{name}: tau", "held out", "if indep."):
            table.add_column(column, justify="right", no_wrap=True)
    if cost:
        table.add_column("x plain", justify="right")
    for size in sizes:
        row = [str(size)]
        known: list[float] = []
        for found in curves.values():
            if size not in found.sizes:
                row += ["", "", ""]
                continue
            at = found.sizes.index(size)
            heldout = found.heldout[at]
            row += [_tau(found.walked[at]), _tau(heldout), _tau(found.independent[at])]
            if found is chosen:
                known.append(found.walked[at] if heldout is None else heldout)
        if cost and known and size <= max(cost.times):
            row.append(f"{cost.speedup(size, known[0]):.2f}")
        table.add_row(*row)
    out.print(table)
    if curves["walk"].heldout[-1] is None:
        out.print("All texts are of one prompt: nothing could be held out.", style="yellow")


def print_spread(out: Console, size: int, walked: Measured) -> None:
    """How far the expectation may be off for other prompts."""
    error = walked.standard_error
    if error == error:
        out.print(
            f"{size} nodes: tau {walked.tau:.3f} +- {error:.3f} (standard error over "
            f"{len(walked.steps)} prompts): expect so much difference on others like them.",
            soft_wrap=True,
        )


def print_measured(out: Console, measured: dict[int, Measured], chosen: Curve) -> None:
    """What decoding gave, and how far each estimate was from it."""
    if not measured:
        return
    out.print("\nMeasured by decoding the prompts, lossless; how far the estimates were off:")
    table = Table(box=None, header_style="bold")
    for name in ("nodes", "steps", "measured", "+-", "expected", "held out", "if indep."):
        table.add_column(name, justify="right", no_wrap=True)
    for size, result in measured.items():
        at = chosen.sizes.index(size)
        estimates = (chosen.walked[at], chosen.heldout[at], chosen.independent[at])
        table.add_row(
            str(size),
            str(sum(result.steps)),
            _tau(result.tau),
            _tau(result.standard_error),
            *(_estimate(value, result.tau) for value in estimates),
        )
    out.print(table)
    if without := [str(size) for size, result in measured.items() if not sum(result.steps)]:
        out.print(
            f"No verification step was taken with {', '.join(without)} nodes: every text ended "
            "with its first token. Measure longer ones (--max-tokens, other prompts).",
            style="yellow",
            soft_wrap=True,
        )


def _estimate(value: float | None, tau: float) -> str:
    """An estimate, and how far it was from what was measured, if that was."""
    off = "" if value is None or tau != tau else f" ({100 * (value / tau - 1):+.1f} %)"
    return f"{_tau(value)}{off}"


def _tau(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"
