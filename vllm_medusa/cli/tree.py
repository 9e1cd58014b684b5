"""`vllm-medusa tree`: the draft tree that suits calibrated heads, written into their config."""

from __future__ import annotations

import math

from rich.table import Table

from vllm_medusa.calibration.options import TreeOptions
from vllm_medusa.cli.console import ConsoleProgress, invocation, stdout_console

_SKETCHED = 24  # nodes of a tree drawn as text

TEXT = """\
Build the tree that gives calibrated heads the most tokens per verification step for a number of
draft nodes, and write it into their config.json, best nodes first. "tree": "heads" serves it, and
with a smaller num_speculative_tokens its best part; without that, trees are dynamic.
---
The calibration's texts are walked as decoding would, so it counts that a head is less often right
after its predecessor's second choice. What is printed is the expected number of tokens per step
(tau); "held out" is the tree of the same size built from one half of the prompts, walked on the
other. `vllm-medusa compare` measures it, and the speed."""


def run(options: TreeOptions, progress: ConsoleProgress) -> int:
    """Choose a tree and print what is known of it."""
    from vllm_medusa.calibration.choose import choose_tree, origin
    from vllm_medusa.calibration.sketch import sketch_tree

    chosen = choose_tree(options, progress, invocation())
    out, size = stdout_console(), len(chosen.paths)
    out.print(
        f"Expected tokens per step (tau), from {origin(chosen.observations)}: on the texts the "
        "tree was built from, and on prompts held out.",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for name in ("nodes", "tau", "held out"):
        table.add_column(name, justify="right")
    for nodes in [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 63, 127) if n < size] + [size]:
        heldout = f"{chosen.heldout[nodes - 1]:.3f}" if chosen.heldout else "-"
        table.add_row(str(nodes), f"{chosen.walked[nodes - 1]:.3f}", heldout)
    out.print(table)
    if chosen.heldout is None:
        out.print("All texts are of one prompt: nothing could be held out.", style="yellow")
    if not math.isnan(chosen.standard_error):
        out.print(
            f"{size} nodes: tau {chosen.walked[-1]:.3f} +- {chosen.standard_error:.3f} (standard "
            "error over the prompts): expect so much difference on others like them.",
            soft_wrap=True,
        )
    more = "" if size <= _SKETCHED else f" (the best {_SKETCHED} of {size})"
    out.print(
        f"\nchoices of the heads, and the share of steps that accept them{more}:", soft_wrap=True
    )
    sketch = sketch_tree(chosen.paths[:_SKETCHED], chosen.chances)
    out.print("\n".join(sketch), markup=False)
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
