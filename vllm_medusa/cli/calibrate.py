"""`vllm-medusa calibrate`: how right and how sure the heads are on text that the target wrote."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_medusa.cli.generate import at_least_zero, positive, report_bad_lines

if TYPE_CHECKING:
    import torch

    from vllm_medusa.calibration.accuracy import Accuracy
    from vllm_medusa.calibration.confidence import Fit
    from vllm_medusa.calibration.observations import Observations
    from vllm_medusa.training.records import Record
    from vllm_medusa.training.target import Target
    from vllm_medusa.tree import TokenTree

DTYPES = ("auto", "float32", "bfloat16", "float16")
WALKED_NODES = 63
_SHOWN_RANKS = 5

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
        "--top-k", type=positive, default=10, metavar="R", help="choices of each head looked at"
    )
    measuring.add_argument(
        "--tree", help="what walks decode with; absent: the best tree of 63 nodes for these texts"
    )
    add_machine(parser)
    parser.set_defaults(run=run, prompts=None)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where and how the target computes."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--batch-tokens", type=positive, default=4096, help="at a time (4096)")
    machine.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    machine.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="the target computes in; auto: its own on GPUs, float32 on CPUs",
    )
    machine.add_argument("--quantization", choices=("4bit", "8bit"), help="of the target")


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
    from vllm_medusa.calibration.summary import summarise
    from vllm_medusa.config import TreeConfig
    from vllm_medusa.heads import load_heads
    from vllm_medusa.heads.checkpoint import peek_heads, update_config
    from vllm_medusa.heads.fingerprint import match_target, target_fingerprint
    from vllm_medusa.heads.provenance import provenance
    from vllm_medusa.training.target import Target
    from vllm_medusa.tree.search import walked_tree
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
    _report(observations, accuracy, fits, tree, which)
    if args.plot:
        draw_calibration(args.plot, observations, accuracy)
        console.print(f"picture: {args.plot}", soft_wrap=True)
    console.print(
        f"saved in {args.heads}; next: vllm-medusa tree {args.heads} --num-draft-tokens N",
        soft_wrap=True,
    )


def check_folder(heads: Path) -> None:
    """Refuse heads that nothing can be saved beside."""
    if not heads.is_dir():
        raise ValueError(
            f"{heads} is no local folder; what is measured is saved beside the heads. Give the "
            "folder of the heads (download or convert them first)."
        )
    if not os.access(heads, os.W_OK):
        raise ValueError(f"{heads} can't be written to, where the results go; copy the heads.")


def heads_digest(folder: Path) -> str:
    """Tells heads of other weights apart, cheaply; the config may change."""
    import hashlib

    from vllm_medusa.heads.files import find_checkpoint
    from vllm_medusa.offline.results import fingerprint

    files = sorted(set(find_checkpoint(folder).files.values()))
    return hashlib.sha256("".join(fingerprint(file) for file in files).encode()).hexdigest()


def machine(args: argparse.Namespace) -> tuple[str, torch.dtype]:
    """Device and dtype from the command line."""
    import torch

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.dtype != "auto":
        return device, getattr(torch, args.dtype)
    if device == "cpu":
        return device, torch.float32
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(args.model).get_text_config().dtype
    return device, own if own in (torch.bfloat16, torch.float16) else torch.float32


def end_tokens(target: Target) -> set[int]:
    """Ids after which the target writes nothing."""
    ends = getattr(target.model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = target.model.config.get_text_config().eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


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


def _read(args: argparse.Namespace, console: Console) -> list[Record]:
    from transformers import AutoTokenizer

    from vllm_medusa.training.records import load_records

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


def position_bar(console: Console, total: int) -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or total == 0,
    )


def _report(
    observations: Observations,
    accuracy: Accuracy,
    fits: list[Fit | None],
    tree: TokenTree,
    which: str,
) -> None:
    from vllm_medusa.calibration.summary import calibration_errors
    from vllm_medusa.tree.search import walk_tau

    out = Console(highlight=False)
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
