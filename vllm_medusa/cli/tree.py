"""`vllm-medusa tree`: the draft tree that suits calibrated heads, written into their config."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli import tree_measure
from vllm_medusa.cli.generate import positive
from vllm_medusa.cli.measuring import check_folder, heads_digest, terminal
from vllm_medusa.cli.outputs import check_json
from vllm_medusa.cli.tree_report import origin, print_curves, print_measured, print_spread

if TYPE_CHECKING:
    from vllm_medusa.calibration.budgets import Curve, StepCost
    from vllm_medusa.calibration.measured import Measured
    from vllm_medusa.calibration.observations import Observations

DEFAULT_BUDGET = 16
_SKETCHED = 24  # nodes of a tree drawn as text

_DESCRIPTION = """\
Build the tree that gives calibrated heads the most tokens per verification step for a number of
draft nodes, and write it into their config.json, best nodes first: serving then uses it without
being told, and a smaller --num-speculative-tokens is the best part of it."""

_EPILOG = """\
walk (default) walks the calibration's texts as decoding would, so it knows that a head is less
often right after its predecessor's second choice. independence is the search of the Medusa paper,
which multiplies the heads' average accuracies. Both print what they expect (tau, tokens per step);
"held out" is the tree of the same size built from one half of the prompts, walked on the other."""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "tree",
        help="build the tree that suits calibrated heads",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("heads", type=Path, help="the heads' folder, calibrated")
    tree = parser.add_argument_group("tree")
    tree.add_argument(
        "--num-draft-tokens",
        "-n",
        type=positive,
        default=DEFAULT_BUDGET,
        metavar="N",
        help=f"nodes, root excluded ({DEFAULT_BUDGET})",
    )
    tree.add_argument("--algorithm", choices=("walk", "independence"), default="walk")
    tree.add_argument("--max-depth", type=positive, metavar="D", help="heads used; absent: all")
    tree.add_argument(
        "--max-rank",
        type=positive,
        metavar="R",
        help="choices of each head; absent: all calibrated",
    )
    tree.add_argument(
        "--step-cost",
        type=Path,
        metavar="FILE",
        help="JSON of draft nodes to a step's time, 0 for plain decoding, such as "
        '{"0": 9.1, "4": 10.2, "16": 14}: take the size that gives most tokens per time',
    )
    results = parser.add_argument_group("results")
    results.add_argument("--draw", type=Path, metavar="FILE", help="a picture: .png, .svg or .pdf")
    results.add_argument("--output", "-o", type=Path, metavar="FILE", help="the tree as JSON, too")
    results.add_argument("--dry-run", action="store_true", help="leave the heads' config as it is")
    tree_measure.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 1 if no tree pays, 2 for bad input."""
    console = Console(file=sys.stderr, highlight=False)
    try:
        return _run(args, console)
    except (ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    from vllm_medusa.calibration.budgets import ALGORITHMS, Limits, StepCost, curve, usual_sizes
    from vllm_medusa.calibration.measured import walked_by_prompt
    from vllm_medusa.calibration.observations import Observations
    from vllm_medusa.calibration.pictures import check_picture, draw_tree
    from vllm_medusa.calibration.sketch import sketch_tree
    from vllm_medusa.calibration.walks import Walks
    from vllm_medusa.tree.topology import TokenTree

    if args.output:
        check_json(args.output, "tree", _is_tree)
    if args.draw:
        check_picture(args.draw)
    observations = Observations.load(args.heads)
    _check(args, observations)
    cost = StepCost.load(args.step_cost) if args.step_cost else None
    prompts = tree_measure.read_prompts(args, observations)
    limits = Limits(args.num_draft_tokens, args.max_rank or observations.num_ranks, args.max_depth)
    sizes = list(range(1, limits.num_draft_tokens + 1))
    with console.status("building trees", spinner="line"):
        curves = {name: curve(observations, name, limits, sizes) for name in ALGORITHMS}
    chosen = curves[args.algorithm]
    out = terminal()
    if len(chosen.paths) < limits.num_draft_tokens:
        console.print(
            f"[yellow]{limits.num_draft_tokens} nodes were asked for; {chosen.algorithm} finds "
            f"{len(chosen.paths)} within depth {args.max_depth or observations.num_heads} and "
            f"{limits.max_rank} choices a head.[/]",
            soft_wrap=True,
        )
    found = {len(each.paths) for each in curves.values()}  # may be fewer than were asked for
    shown = sorted({*usual_sizes(max(found)), *found})
    print_curves(out, curves, chosen, shown, cost, observations)
    size = _choose(out, chosen, cost)
    if size == 0:
        out.print(
            "At these step costs no tree is faster than plain decoding: serve without speculation, "
            "or measure the costs again. The heads' config is as it was.",
            soft_wrap=True,
        )
        return 1
    paths = chosen.paths[:size]
    walked = walked_by_prompt(observations, paths)
    print_spread(out, size, walked)
    walks = Walks(observations.texts())
    for path in paths:
        walks.add(path)
    visits = walks.visits()
    chances = {path: float(n / visits[0]) for path, n in zip(walks.paths, visits, strict=True)}
    lines = sketch_tree(paths[:_SKETCHED], chances)
    more = "" if size <= _SKETCHED else f" (the best {_SKETCHED} of {size})"
    out.print(
        f"\nchoices of the heads, and the share of steps that accept them{more}:", soft_wrap=True
    )
    out.print("\n".join(lines), markup=False)
    measured = tree_measure.measure_tree(args, console, paths, prompts) if prompts else {}
    print_measured(out, measured, chosen)
    if args.draw:
        heldout = chosen.heldout[size - 1]
        elsewhere = "" if heldout is None else f" ({heldout:.2f} on prompts held out)"
        title = (
            f"{args.heads.resolve().name}: {size} draft nodes, {walked.tau:.2f} tokens per step "
            f"expected{elsewhere}\n{chosen.algorithm}; {origin(observations)}"
        )
        draw_tree(args.draw, paths, chances, title)
        out.print(f"picture: {args.draw}", soft_wrap=True)
    note = _note(args, observations, chosen, size, walked, measured)
    tree = TokenTree.from_paths(paths).to_lists()
    if args.output:
        _write_json(args.output, {"tree": tree, "source": note})
        out.print(f"tree: {args.output}", soft_wrap=True)
    if args.dry_run:
        out.print("dry run: the heads' config is as it was")
        return 0
    _save(args, tree, note)
    out.print(f"{args.heads / 'config.json'} has the tree; serving uses it", soft_wrap=True)
    return 0


def _check(args: argparse.Namespace, observations: Observations) -> None:
    from vllm_medusa.tree.topology import MAX_NODES

    if not args.dry_run:
        check_folder(args.heads)
    if args.num_draft_tokens >= MAX_NODES:
        raise ValueError(
            f"--num-draft-tokens is {args.num_draft_tokens}; a tree has at most {MAX_NODES - 1}."
        )
    for name, value, most, what in (
        ("--max-depth", args.max_depth, observations.num_heads, "heads"),
        ("--max-rank", args.max_rank, observations.num_ranks, "calibrated choices (--top-k)"),
    ):
        if value is not None and value > most:
            raise ValueError(f"{name} is {value}; there are {most} {what}. Ask for less.")
    digest = observations.source.get("heads")
    if digest is not None and digest != heads_digest(args.heads):
        raise ValueError(
            f"the heads in {args.heads} have changed since they were calibrated, so what is known "
            "of them is no longer true; run `vllm-medusa calibrate` again."
        )
    for path in (args.output, args.draw):
        if path and not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} doesn't exist; make it first.")


def _choose(out: Console, chosen: Curve, cost: StepCost | None) -> int:
    """How many nodes to take: all, or as many as pay, which may be none."""
    if cost is None:
        return len(chosen.paths)
    taus = [
        walked if heldout is None else heldout
        for walked, heldout in zip(chosen.walked, chosen.heldout, strict=True)
    ]
    size, gain = cost.best(chosen.sizes, taus)
    if size == 0:
        return 0
    out.print(f"{size} draft nodes give most tokens per time: {gain:.2f} times plain decoding's")
    return size


def _note(
    args: argparse.Namespace,
    observations: Observations,
    chosen: Curve,
    size: int,
    walked: Measured,
    measured: dict[int, Measured],
) -> dict[str, Any]:
    """Where the tree is from, as plain JSON."""

    def per_size(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else round(value, 4) for value in values[:size]]

    return {
        "algorithm": chosen.algorithm,
        "max_depth": args.max_depth,
        "max_rank": args.max_rank or observations.num_ranks,
        "temperature": observations.temperature(),
        "positions": len(observations.ranks),
        "tokens_per_step": per_size(chosen.walked),
        "standard_error": _number(walked.standard_error),
        "tokens_per_step_heldout": per_size(chosen.heldout),
        "tokens_per_step_if_independent": per_size(chosen.independent),
        "measured": {
            str(n): {
                "tokens_per_step": _number(result.tau),
                "standard_error": _number(result.standard_error),
                "steps": sum(result.steps),
                "prompts": len(result.steps),
            }
            for n, result in measured.items()
        },
    }


def _save(args: argparse.Namespace, tree: list[list[int]], note: dict[str, Any]) -> None:
    from vllm_medusa.calibration.observations import FILE
    from vllm_medusa.heads.checkpoint import update_config
    from vllm_medusa.heads.provenance import provenance

    origin = provenance(["vllm-medusa", *sys.argv[1:]], [args.heads / FILE])
    update_config(
        args.heads,
        tree=tree,
        tree_tokens_per_step=note["tokens_per_step"],
        tree_source=note,
        provenance=origin,
    )


def _is_tree(document: dict[str, Any]) -> bool:
    """Whether this is what --output holds."""
    from vllm_medusa.tree.forms import read_tree
    from vllm_medusa.tree.topology import TreeError

    try:
        read_tree(document)
    except TreeError:
        return False
    note = document.get("source")
    return isinstance(note, dict) and "algorithm" in note


def _write_json(path: Path, document: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _number(value: float) -> float | None:
    return None if value != value else round(value, 4)
