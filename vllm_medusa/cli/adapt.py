"""`vllm-medusa adapt`: a target and prompts in; heads out that are trained, measured and ready."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli import generate
from vllm_medusa.cli.adapt_checks import AdaptError, Facts, check, written_by_adapt
from vllm_medusa.cli.adapt_stages import PROMPTS, TARGET, Adaptation, train_command
from vllm_medusa.cli.generate import at_least_zero, positive
from vllm_medusa.cli.stages import WORK, StageFailed, WorkFolder
from vllm_medusa.offline.options import CompareOptions

_DESCRIPTION = """\
Make heads for a target, from prompts like those it will be used with: the target writes texts for
the prompts (distill), heads are trained on them (train), their accuracy is measured on texts held
out (calibrate), the tree that suits them is grown (tree), and vLLM with these heads runs beside
plain vLLM on prompts that nothing was trained or calibrated on (compare). The tree size that is
fastest on this machine becomes the heads' own."""

_EPILOG = """\
Every stage is a command of its own and is printed before it runs; all are in the work folder, with
their logs. Killed or interrupted, the same command goes on where it stopped; with other options,
only the stages that they concern are run again. The output has the heads (config.json and
model.safetensors, as vLLM reads them), report.md with pictures, and report.json."""

# Options that are train's own; given, they are passed on.
_TRAIN = {
    "--num-heads": (positive, "heads (train's own number: 5)"),
    "--num-layers": (positive, "residual layers of each head (1)"),
    "--epochs": (positive, "passes over the texts"),
    "--learning-rate": (float, "the heads' peak"),
}

# What adapt's own options set in train's command, and what else it needs as it has it.
_GIVEN_TO_ADAPT = (
    "method",
    "seed",
    "dtype",
    "heldout_share",
    *(name[2:].replace("-", "_") for name in _TRAIN),
)
_SET_BY_ADAPT = ("data", "heldout", "output", "overwrite", "save")


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "adapt",
        help="heads for a target, from prompts to a measured report; resumable",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="a folder or a hub name")
    generate.add_files(parser, "folder for the heads and their report")
    texts = parser.add_argument_group("texts (distill)")
    texts.add_argument("--samples", type=positive, default=1, help="of each prompt (1)")
    texts.add_argument("--max-tokens", type=positive, default=512, help="of each answer (512)")
    texts.add_argument(
        "--temperature", type=at_least_zero, default=0.7, help="also of the final measure (0.7)"
    )
    texts.add_argument("--batch", type=positive, help="prompts at a time")
    texts.add_argument(
        "--heldout-share",
        type=float,
        default=0.1,
        help="of the prompts; half to calibrate, half to measure (0.1, at least 8 prompts)",
    )
    training = parser.add_argument_group("training (train)")
    training.add_argument("--method", choices=("medusa-1", "medusa-2"), default="medusa-1")
    for name, (kind, words) in _TRAIN.items():
        training.add_argument(name, type=kind, help=words)
    training.add_argument(
        "--train-args",
        default="",
        metavar="TEXT",
        help="more of train's options, as in --train-args='--labels tokens'",
    )
    tree = parser.add_argument_group("tree and measuring (tree, compare)")
    tree.add_argument(
        "--num-draft-tokens", type=positive, metavar="N", help="the tree's size; absent: fastest"
    )
    tree.add_argument(
        "--budgets", type=positive, nargs="+", default=list(CompareOptions.budgets), metavar="N"
    )
    tree.add_argument("--measure-tokens", type=positive, default=128, help="of an answer (128)")
    tree.add_argument("--measure-prompts", type=positive, default=32, help="at most (32)")
    tree.add_argument("--rounds", type=positive, default=3, help="of the measurement (3)")
    parser.add_argument("--work", type=Path, help="folder for records, logs... (OUTPUT.work)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the target, in all stages",
    )
    parser.add_argument(
        "--engine-args",
        type=generate.json_object,
        default={},
        metavar="JSON",
        help="more LLM arguments, for distill and compare",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if a stage failed or tokens differ, 2 for bad input, 130."""
    args.work = args.work or args.output.parent / f"{args.output.name}.work"
    with os.fdopen(os.dup(2), "w") as terminal, _ending_on_signals():
        console = Console(file=terminal, highlight=False)
        try:
            return _run(args, console)
        except StageFailed as error:
            console.print(f"[bold red]stopped:[/] {escape(str(error))}", soft_wrap=True)
            console.print("Once that is mended, the same command goes on from there.")
            return 130 if error.status == 130 else 2 if error.status == 2 else 1
        except (ValueError, OSError) as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            return 2
        except KeyboardInterrupt:
            console.print(
                f"interrupted; the same command goes on from what is in {args.work}",
                soft_wrap=True,
            )
            return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    _check_options(args)
    facts = check(args, console)
    key = key_of(args, facts)
    existing = written_by_adapt(args.output)
    if existing is not None and not args.overwrite:
        if existing == key:
            console.print(f"nothing to do; the heads are in {args.output}", soft_wrap=True)
            return 0
        raise AdaptError(
            f"{args.output} holds heads of another adapt: other options, prompts or weights. Pass "
            "--overwrite to replace them, or name another --output."
        )
    places = {TARGET: args.target, PROMPTS: str(args.prompts)}
    with WorkFolder(args.work, console, Adaptation.count, places) as work:
        return Adaptation(args, facts, key, work, console).run()


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what a later stage would refuse.

    Raises:
        ValueError: an option, or two together, can't be.

    """
    from vllm_medusa.cli import build_parser
    from vllm_medusa.cli.flags import from_flags
    from vllm_medusa.training.options import TrainOptions
    from vllm_medusa.tree.topology import MAX_NODES

    if not 0 < args.heldout_share <= 0.5:
        raise AdaptError(
            f"--heldout-share is {args.heldout_share:g}; use more than 0, at most 0.5."
        )
    for size in filter(None, (args.num_draft_tokens, *args.budgets)):
        if size >= MAX_NODES:
            raise AdaptError(f"a tree of {size} draft nodes; at most {MAX_NODES - 1} are possible.")
    parse = build_parser().parse_args
    training = parse(train_command(args, WORK))  # a wrong option ends here
    without = argparse.Namespace(**{**vars(args), "train_args": ""})
    _check_train_args(training, parse(train_command(without, WORK)))
    from_flags(TrainOptions, training)  # what goes together
    for name in ("max_tokens", "measure_tokens"):
        if getattr(args, name) < training.num_heads + 2:
            raise AdaptError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; {training.num_heads} heads "
                f"need answers of at least {training.num_heads + 2} tokens."
            )


def _check_train_args(training: argparse.Namespace, own: argparse.Namespace) -> None:
    """Refuse `--train-args` that change what adapt decides: ``own`` is its command without them."""
    for name in (*_GIVEN_TO_ADAPT, *_SET_BY_ADAPT):
        if getattr(training, name) != getattr(own, name):
            remedy = "give it to adapt itself" if name in _GIVEN_TO_ADAPT else "leave it out"
            option = f"--{name.replace('_', '-')}"
            raise AdaptError(f"--train-args has {option}, which adapt decides: {remedy}.")


def key_of(args: argparse.Namespace, facts: Facts) -> str:
    """A digest of everything that the result depends on."""
    ignored = {"run", "output", "work", "overwrite", "prompts", "target"}
    options = {name: value for name, value in vars(args).items() if name not in ignored}
    text = json.dumps([options, facts.target, facts.prompts_digest], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Within this, SIGTERM and SIGHUP end the command as Ctrl-C does: the stage's processes too."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
