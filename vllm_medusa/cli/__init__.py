"""The `vllm-medusa` command: argument parsing and printing, nothing else."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import vllm_medusa
from vllm_medusa.cli import (
    adapt,
    calibrate,
    compare,
    convert,
    distill,
    explain,
    generate,
    inspect,
    serve,
    train,
    tree,
)


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
        parser.error(f"unrecognized arguments: {' '.join(unknown)}.{meant}")
    sys.exit(args.run(args))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="vllm-medusa",
        description="Medusa tree speculative decoding for vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"vllm-medusa {vllm_medusa.__version__}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for each in (generate, adapt, distill, train, calibrate, tree):
        each.COMMAND.add_to(commands)
    commands.add_parser(
        "serve",
        add_help=False,
        help="vLLM's OpenAI-compatible server, with Medusa; every option is vLLM's own",
    )
    for each in (convert, inspect, compare, explain):
        each.COMMAND.add_to(commands)
    return parser
