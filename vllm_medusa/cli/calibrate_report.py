"""What `vllm-medusa calibrate` tells on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from vllm_medusa.calibration.search import walk_tau
from vllm_medusa.calibration.summary import calibration_errors
from vllm_medusa.cli.measuring import terminal

if TYPE_CHECKING:
    from vllm_medusa.calibration.accuracy import Accuracy
    from vllm_medusa.calibration.confidence import Fit
    from vllm_medusa.calibration.observations import Observations
    from vllm_medusa.tree import TokenTree

_SHOWN_RANKS = 5


def report(
    observations: Observations,
    accuracy: Accuracy,
    fits: list[Fit | None],
    tree: TokenTree,
    which: str,
) -> None:
    """Print the tables; ``which`` names the tree of the walks."""
    out = terminal()
    temperature = observations.temperature()
    wrote = "not the target's own" if temperature is None else f"temperature {temperature:g}"
    out.print(
        f"{len(observations.ranks)} positions of {observations.num_texts} texts, {wrote}. "
        f"In %; best choice first.",
        soft_wrap=True,
    )
    shown = min(_SHOWN_RANKS, observations.num_ranks)
    table = Table(box=None, header_style="bold", title="every position", title_justify="left")
    for name in ("head", *(f"choice {rank}" for rank in range(shown))):
        table.add_column(name, justify="right")
    table.add_column(f"best {observations.num_ranks}", justify="right")
    for name in ("ECE", "fitted T", "ECE then"):
        table.add_column(name, justify="right")
    errors = calibration_errors(observations)
    for head, row in enumerate(accuracy.overall):
        fit = fits[head]
        table.add_row(
            str(head),
            *(percent(share) for share in row[:shown]),
            percent(row.sum()),
            percent(errors[head][0]),
            "-" if fit is None else f"{fit.temperature:.2f}",
            "-" if fit is None else percent(fit.fitted_ece),
        )
    out.print(table)
    table = Table(box=None, header_style="bold", title_justify="left")
    table.title = "best choice, by the choices accepted before it (steps that asked)"
    for name in ("head", "everywhere:", "after best", "others", "walked:", "after best", "others"):
        table.add_column(name, justify="right", no_wrap=True)
    names = ("overall", "spine", "sibling", "walked", "walked_spine", "walked_sibling")
    for head in range(observations.num_heads):
        cells = [percent(getattr(accuracy, name)[head, 0]) for name in names]
        for place in (4, 5):
            if asked := accuracy.asked[head, place]:
                cells[place] += f" ({asked})"
        table.add_row(str(head), *cells)
    out.print(table)
    tau = walk_tau(observations.texts(), tree.paths)
    out.print(
        f"walked: where decoding asks, with {which} of {tree.num_draft_tokens} draft nodes "
        f"({tau:.3f} tokens per step)",
        soft_wrap=True,
    )


def percent(share: float | None) -> str:
    """``12.3``, or ``-`` for nothing."""
    return "-" if share is None or share != share else f"{100 * share:.1f}"
