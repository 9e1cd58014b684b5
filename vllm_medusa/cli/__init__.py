"""The `vllm-medusa` command: argument parsing and printing, nothing else."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, get_type_hints

from vllm_medusa.cli import calibrate, checkpoints, compare, doctor, generate, serve, train
from vllm_medusa.cli.console import ConsoleProgress, run_job
from vllm_medusa.cli.hub import find_models
from vllm_medusa.options import Options, Parser, add_flags, from_flags

COMMANDS: dict[str, tuple[Callable[[Any, ConsoleProgress], int], str]] = {
    # name -> function that returns the exit status; help, and after a line "---" the epilog
    "generate": (generate.run, generate.GENERATE),
    "adapt": (compare.run_adapt, compare.ADAPT),
    "distill": (generate.run_distill, generate.DISTILL),
    "train": (train.run, train.TEXT),
    "calibrate": (calibrate.run, calibrate.CALIBRATE),
    "tree": (calibrate.run_tree, calibrate.TREE),
    "convert": (checkpoints.run_convert, checkpoints.CONVERT),
    "inspect": (checkpoints.run_inspect, checkpoints.INSPECT),
    "compare": (compare.run, compare.COMPARE),
    "doctor": (doctor.run, doctor.DOCTOR),
}
_RESUMABLE = ("generate", "distill", "train", "calibrate", "adapt")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # every option after it belongs to vLLM
        sys.exit(serve.run(arguments[1:]))
    if arguments == ["--version"]:
        print(doctor.versions())
        sys.exit()
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        close = get_close_matches(unknown[0].partition("=")[0], args.known)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    run, _ = COMMANDS[args.command]

    def job(progress: ConsoleProgress) -> int:
        options = from_flags(options_of(run), args)
        find_models(options, progress)
        return run(options, progress)

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
        "--version", action="store_true", help="versions of this package, vLLM, torch, Python"
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, (run, text) in COMMANDS.items():
        description, _, epilog = text.partition("\n---\n")
        own = commands.add_parser(
            name,
            help=re.split(r"[.:]\s", description)[0].replace("\n", " "),
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --budget would be read as --budgets
        )
        add_flags(own, options_of(run))
        own.set_defaults(known=tuple(own._option_string_actions), parser=own)
    commands.add_parser(
        "serve",
        add_help=False,
        help="start vLLM's OpenAI-compatible server with this plugin; all options are vLLM's",
    )
    return parser


def options_of(run: Callable[..., int]) -> type[Options]:
    """The options of a command."""
    kind: type[Options] = get_type_hints(run)["options"]
    return kind
