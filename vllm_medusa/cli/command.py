"""A command of `vllm-medusa`: its options, its help, and what runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_medusa.cli.console import ConsoleProgress, run_job
from vllm_medusa.cli.flags import add_flags, from_flags
from vllm_medusa.options import Options


@dataclass(frozen=True)
class Command:
    """One command."""

    name: str
    help: str  # a line in the list of commands
    options: type[Options]  # its options; the parser is made of them
    run: Callable[[Any, ConsoleProgress], int]  # prints the result; returns the exit status
    description: str = ""  # what it does, above the options
    epilog: str = ""  # formats of files and the like, below them
    # what Ctrl-C leaves, given the parsed command line
    interrupted: Callable[[argparse.Namespace], str] = lambda args: "nothing was written"
    engine: bool = False  # it starts vLLM in this process, whose noise is kept off the terminal

    def add_to(self, commands: Any) -> None:
        """Add this command to the subcommands of a parser."""
        parser = commands.add_parser(
            self.name,
            help=self.help,
            description=self.description,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --budget would be read as --budgets
        )
        add_flags(parser, self.options)
        parser.set_defaults(run=self._run, known=tuple(parser._option_string_actions))

    def _run(self, args: argparse.Namespace) -> int:
        return run_job(
            lambda progress: self.run(from_flags(self.options, args), progress),
            interrupted=self.interrupted(args),
            engine=self.engine,
        )


def invocation() -> list[str]:
    """The words of the command that runs, for the provenance of what it makes."""
    return ["vllm-medusa", *sys.argv[1:]]
