"""`vllm-medusa tree`: write the best draft tree for calibrated heads into their config."""

from __future__ import annotations

from vllm_medusa.calibration.options import TreeOptions
from vllm_medusa.cli.console import (
    ConsoleProgress,
    drawn_tree,
    figures,
    invocation,
    stdout_console,
)

_SHOWN_NODES = 24  # of a tree drawn as text

TEXT = """\
Build the best tree for calibrated heads: of a number of draft nodes, the one with the most tokens
per verification step. It is written into their config.json, best nodes first. "tree": "heads"
serves it, and with a smaller num_speculative_tokens its best part; without that, trees are dynamic.
---
The calibration texts are walked as in decoding, which accounts for the lower accuracy of a head
after its predecessor's second choice. The output is the expected number of tokens per step (tau);
"held out" is for a tree of the same size built from one half of the prompts and walked on the
other. `vllm-medusa compare` measures tau and speed."""


def run(options: TreeOptions, progress: ConsoleProgress) -> int:
    """Choose a tree and print its estimates."""
    from vllm_medusa.calibration.choose import choose_tree, origin

    chosen = choose_tree(options, progress, invocation())
    out, size = stdout_console(), len(chosen.paths)
    out.print(
        f"Expected tokens per step (tau), from {origin(chosen.observations)}: on the texts the "
        "tree was built from, and on prompts held out.",
        soft_wrap=True,
    )
    table = figures("nodes", "tau", "held out", box=None, header_style="bold")
    for nodes in [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 63, 127) if n < size] + [size]:
        heldout = f"{chosen.heldout[nodes - 1]:.3f}" if chosen.heldout else "-"
        table.add_row(str(nodes), f"{chosen.walked[nodes - 1]:.3f}", heldout)
    out.print(table)
    if chosen.heldout is None:
        out.print("All texts have the same prompt: nothing could be held out.", style="yellow")
    more = "" if size <= _SHOWN_NODES else f" (the best {_SHOWN_NODES} of {size})"
    out.print(
        f"\nchoices of the heads, with the share of steps that accept them{more}:", soft_wrap=True
    )
    out.print(drawn_tree(chosen.paths[:_SHOWN_NODES], chosen.chances))
    if options.draw:
        out.print(f"picture: {options.draw}", soft_wrap=True)
    config = options.heads / "config.json"
    out.print(f'{config} has the tree; "tree": "heads" serves it', soft_wrap=True)
    return 0
