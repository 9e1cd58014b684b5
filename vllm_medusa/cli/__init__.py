"""The `vllm-medusa` command: argument parsing and printing, nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import vllm_medusa
from vllm_medusa.cli import (
    adapt,
    calibrate,
    compare,
    convert,
    generate,
    inspect,
    serve,
    train,
    tree,
)
from vllm_medusa.cli.console import ConsoleProgress, run_job
from vllm_medusa.cli.flags import Parser, add_flags, from_flags
from vllm_medusa.cli.hub import find_models
from vllm_medusa.options import Options


class Command(NamedTuple):
    """A subcommand."""

    help: str  # a line in the list of commands
    options: type[Options]  # define the flags
    run: Callable[[Any, ConsoleProgress], int]  # prints the result; returns the exit status
    text: str  # description, and after a line "---" the epilog


COMMANDS = {
    "generate": Command(
        "generate for a file of prompts; resumable",
        generate.GenerateOptions,
        generate.run,
        generate.GENERATE,
    ),
    "adapt": Command(
        "heads for a target, from prompts to a measured report; resumable",
        adapt.AdaptOptions,
        adapt.run,
        adapt.TEXT,
    ),
    "distill": Command(
        "generate training texts for heads with the target; resumable",
        generate.DistillOptions,
        generate.run_distill,
        generate.DISTILL,
    ),
    "train": Command(
        "train heads, or an EAGLE-3 drafter, for a target; resumable",
        train.TrainOptions,
        train.run,
        train.TEXT,
    ),
    "calibrate": Command(
        "measure heads on text the target wrote; resumable",
        calibrate.CalibrateOptions,
        calibrate.run,
        calibrate.TEXT,
    ),
    "tree": Command(
        "build the best tree for calibrated heads", tree.TreeOptions, tree.run, tree.TEXT
    ),
    "convert": Command(
        "heads, or an EAGLE-3 drafter, from any known format to any other",
        convert.ConvertOptions,
        convert.run,
        convert.TEXT,
    ),
    "inspect": Command(
        "describe a checkpoint of heads or of a drafter, and check that it fits",
        inspect.InspectOptions,
        inspect.run,
        inspect.TEXT,
    ),
    "compare": Command(
        "heads against plain vLLM: token equality and speed by tree size",
        compare.CompareOptions,
        compare.run,
        compare.TEXT,
    ),
}
_RESUMABLE = ("generate", "distill", "train", "calibrate", "adapt")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # every option after it belongs to vLLM
        sys.exit(serve.run(arguments[1:]))
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        close = get_close_matches(unknown[0].partition("=")[0], args.known)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    command = COMMANDS[args.command]

    def job(progress: ConsoleProgress) -> int:
        options = from_flags(command.options, args)
        find_models(options, progress)
        return command.run(options, progress)

    resumes = args.command in _RESUMABLE
    interrupted = "the same command resumes" if resumes else "nothing was written"
    sys.exit(run_job(job, interrupted=interrupted))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = Parser(
        prog="vllm-medusa",
        description="Medusa tree speculative decoding for vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"vllm-medusa {vllm_medusa.__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, command in COMMANDS.items():
        description, _, epilog = command.text.partition("\n---\n")
        own = commands.add_parser(
            name,
            help=command.help,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --budget would be read as --budgets
        )
        add_flags(own, command.options)
        own.set_defaults(known=tuple(own._option_string_actions), parser=own)
    commands.add_parser(
        "serve",
        add_help=False,
        help="vLLM's OpenAI-compatible server, with Medusa; every option is vLLM's own",
    )
    return parser
