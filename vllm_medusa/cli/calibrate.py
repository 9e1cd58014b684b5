"""`vllm-medusa calibrate`: how right and how sure the heads are on text that the target wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli.generate import at_least_zero, positive, report_bad_lines
from vllm_medusa.cli.measuring import (
    add_machine,
    check_folder,
    end_tokens,
    heads_digest,
    machine,
    position_bar,
)

if TYPE_CHECKING:
    from vllm_medusa.offline.records import Record
    from vllm_medusa.training.target import Target

WALKED_NODES = 63

_DESCRIPTION = """\
Measure the heads on text that they were not trained on: how often each choice of each head is
right, everywhere and where decoding really asks, and whether the heads know how sure to be. What
was seen is saved beside the heads (calibration.safetensors), a summary in their config.json;
`vllm-medusa tree` builds the tree from it. Killed, the same command goes on where it stopped."""

_EPILOG = """\
Data: records of `vllm-medusa distill`, best of prompts that were held out. The target's own text,
sampled as it will be when served, is what decoding asks the heads for: calibrate on temperature 0
for greedy serving. Other text is taken, with a warning, and tells less."""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure heads on text the target wrote",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="the target: a folder or a hub name")
    parser.add_argument("heads", type=Path, help="the heads' folder")
    files = parser.add_argument_group("files")
    files.add_argument("--data", "-i", type=Path, required=True, help="records, as JSON lines")
    files.add_argument(
        "--on-bad-line",
        choices=("refuse", "skip"),
        default="refuse",
        help="refuse: do nothing while the file has a bad line (default); skip: leave it out",
    )
    files.add_argument("--limit", type=positive, metavar="N", help="use only the first N records")
    files.add_argument(
        "--temperature", type=at_least_zero, help="use only records sampled at this temperature"
    )
    files.add_argument(
        "--max-text-tokens", type=positive, metavar="N", help="longer texts are bad lines"
    )
    files.add_argument("--plot", type=Path, metavar="FILE", help="a picture: .png, .svg or .pdf")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--top-k",
        type=_choices,
        default=10,
        metavar="R",
        help="choices of each head looked at (10)",
    )
    measuring.add_argument(
        "--tree", help="what walks decode with; absent: the best tree of 63 nodes for these texts"
    )
    computing = parser.add_argument_group("machine")
    computing.add_argument("--batch-tokens", type=positive, default=4096, help="at a time (4096)")
    add_machine(computing)
    parser.set_defaults(run=run, prompts=None)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, or 2 for bad input."""
    console = Console(file=sys.stderr, highlight=False)
    try:
        _run(args, console)
        return 0
    except (ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it stopped")
        return 130


def _run(args: argparse.Namespace, console: Console) -> None:
    from vllm_medusa.calibration.accuracy import measure_accuracy
    from vllm_medusa.calibration.collect import collect, remove_work
    from vllm_medusa.calibration.pictures import check_picture, draw_calibration
    from vllm_medusa.calibration.search import walked_tree
    from vllm_medusa.calibration.summary import summarise
    from vllm_medusa.cli.calibrate_report import report
    from vllm_medusa.config import TreeConfig
    from vllm_medusa.heads import load_heads
    from vllm_medusa.heads.checkpoint import peek_heads, update_config
    from vllm_medusa.heads.fingerprint import match_target, target_fingerprint
    from vllm_medusa.heads.provenance import provenance
    from vllm_medusa.training.target import Target
    from vllm_medusa.tree.topology import TokenTree

    check_folder(args.heads)
    if args.plot:
        check_picture(args.plot)
    info = peek_heads(args.heads)
    tree = None
    if args.tree:
        tree = TreeConfig.resolve(args.tree, None, info.num_heads, info.draft_vocab_size)
    if warning := match_target(info, args.model, heads=args.heads).warning:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    records = _read(args, console)
    device, dtype = machine(args)
    target = Target.load(args.model, dtype=dtype, device=device, quantization=args.quantization)
    check_ids(records, target, args)
    heads, _ = load_heads(
        args.heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=target.device,
    )
    if args.top_k > heads.draft_vocab_size:
        raise ValueError(
            f"--top-k is {args.top_k}; the heads score {heads.draft_vocab_size} tokens. Take fewer."
        )
    origin = provenance(["vllm-medusa", *sys.argv[1:]], [args.data])
    if origin["data"][0]["sha256"] in _trained_on(info.config):
        console.print(
            f"[yellow]warning:[/] the heads were trained on {escape(str(args.data))}: they are "
            "right on it more often than they will be. Calibrate on records held out, such as "
            "training/heldout.jsonl beside the heads.",
            soft_wrap=True,
        )
    source = {
        "target": target_fingerprint(args.model),
        "heads": heads_digest(args.heads),
        "data": origin["data"],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": args.quantization,
    }
    depends_on = source | {"limit": args.limit, "temperature": args.temperature}
    total = sum(end - start for record in records for start, end in record.generated)
    with position_bar(console, total) as bar:
        task = bar.add_task("positions", total=total)
        observations, fits = collect(
            records,
            heads,
            target.hidden_states,
            target.lm_head if heads.shared_lm_head else None,
            args.heads,
            num_ranks=args.top_k,
            end_tokens=end_tokens(target),
            batch_tokens=args.batch_tokens,
            device=target.device,
            depends_on=depends_on,
            progress=lambda count: bar.advance(task, count),
        )
        bar.update(task, completed=total)
    observations.source.update(source)
    if tree is None:
        with console.status("walking the texts", spinner="line"):
            paths, _ = walked_tree(observations.texts(), WALKED_NODES, args.top_k)
        tree = TokenTree.from_paths(paths)
    accuracy = measure_accuracy(observations, tree.paths)
    summary = summarise(observations, accuracy, fits, tree)
    observations.save(args.heads)
    update_config(args.heads, calibration=summary, provenance=origin)
    remove_work(args.heads)
    which = "the tree given" if args.tree else "the best tree"
    report(observations, accuracy, fits, tree, which)
    if args.plot:
        draw_calibration(args.plot, observations, accuracy)
        console.print(f"picture: {args.plot}", soft_wrap=True)
    console.print(
        f"saved in {args.heads}; next: vllm-medusa tree {args.heads} --num-draft-tokens N",
        soft_wrap=True,
    )


def check_ids(records: list[Record], target: Target, args: argparse.Namespace) -> None:
    """Refuse records of another vocabulary or longer than the target can read."""
    config = target.model.config.get_text_config()
    room = getattr(config, "max_position_embeddings", None)
    for record in records:
        if max(record.token_ids) >= target.vocab_size:
            raise ValueError(
                f"{args.data}, line {record.line}: token {max(record.token_ids)} is outside the "
                f"target's vocabulary of {target.vocab_size}; was it made with another target?"
            )
        if room is not None and len(record.token_ids) > room:
            raise ValueError(
                f"{args.data}, line {record.line}: {len(record.token_ids)} tokens, and the target "
                f"has {room} positions. Leave such texts out: --max-text-tokens {room} "
                "--on-bad-line skip."
            )


def _choices(text: str) -> int:
    """Parse how many choices of a head are looked at."""
    from vllm_medusa.tree.topology import MAX_NODES

    value = positive(text)
    if value >= MAX_NODES:
        raise argparse.ArgumentTypeError(
            f"{value} is not allowed; use at most {MAX_NODES - 1}: no tree takes more choices"
        )
    return value


def _trained_on(config: Mapping[str, Any]) -> set[str]:
    """SHA-256 of the files that the heads were trained on, as their config says."""
    extra = config.get("medusa")
    entries = extra.get("provenance") if isinstance(extra, Mapping) else None
    return {
        entry["data"][0]["sha256"]  # further ones are held out
        for entry in (entries if isinstance(entries, list) else [])
        if entry.get("command", [])[1:2] == ["train"] and entry.get("data")
    }


def _read(args: argparse.Namespace, console: Console) -> list[Record]:
    from transformers import AutoTokenizer

    from vllm_medusa.offline.records import load_records

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError):
        tokenizer = None  # records of token ids need none; other lines say so themselves
    records, bad = load_records(args.data, tokenizer, max_tokens=args.max_text_tokens)
    args.prompts = args.data  # what `report_bad_lines` names
    report_bad_lines(bad, args, console)
    if args.temperature is not None:
        found = sorted({r.temperature for r in records if r.temperature is not None})
        records = [record for record in records if record.temperature == args.temperature]
        if not records:
            shown = ", ".join(f"{t:g}" for t in found) or "none"
            raise ValueError(
                f"{args.data} has no record of temperature {args.temperature:g}; it has {shown}."
            )
    records = records[: args.limit]
    if not records:
        raise ValueError(f"{args.data}: no records in it.")
    foreign = sum(record.temperature is None for record in records)
    if foreign:
        console.print(
            f"[yellow]warning:[/] {foreign} of {len(records)} texts don't say at which temperature "
            "the target wrote them, so they may not be its own. Heads are right more or less often "
            "on such text than when they are served; use records of `vllm-medusa distill`.",
            soft_wrap=True,
        )
    if len({record.temperature for record in records} - {None}) > 1:
        console.print(
            "[yellow]warning:[/] the texts were sampled at several temperatures; expected values "
            "are of the mixture. --temperature T takes those of one.",
            soft_wrap=True,
        )
    return records
