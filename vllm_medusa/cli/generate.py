"""`vllm-medusa generate`: a file of prompts in, a file of results out, resumable at any moment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli.command import Command
from vllm_medusa.cli.console import ConsoleProgress
from vllm_medusa.offline.options import GenerateOptions
from vllm_medusa.offline.prompts import FORMATS, BadLine, PromptError

if TYPE_CHECKING:
    from vllm_medusa.offline.generate import Generated
    from vllm_medusa.training.distill import Distilled

_DESCRIPTION = """\
Generate for every prompt of a file and write one JSON line per prompt, in the order in which they
finish. Killed or interrupted, the same command goes on where it stopped: no line is written twice
and none is lost."""

_EPILOG = """\
Prompts: a text file (one per line), JSON lines or Parquet. A row has "prompt" (continued as it
stands), "messages" or "turns" (a conversation: the model's chat template is used if it has one,
else the texts are joined as they are; each answer is part of the next turn's prompt).

Results: index (position in the file, from 0), request_id, text, token_ids, finish_reason,
stop_reason and acceptance (steps, accepted_draft_tokens, tokens_per_step, histogram); "turns" holds
each turn's answer when there are several. A prompt that can't be run has "error" instead."""


def run(options: GenerateOptions, progress: ConsoleProgress) -> int:
    """Generate, and say how fast; 1 if prompts have an error for a result."""
    from vllm_medusa.offline.generate import generate

    return conclude(generate(options, progress), "results", progress)


def conclude(done: Generated | Distilled, what: str, progress: ConsoleProgress) -> int:
    """Say how fast it was, what failed and where everything is; the exit status."""
    if done.speed is not None:
        progress.note(str(done.speed))
    progress.note(f"{what} in {done.output}")
    if not done.failed:
        return 0
    progress.note(
        f"{done.failed} prompts could not be run; their lines have an 'error'. To try them again, "
        "remove these lines and repeat the command."
    )
    return 1


COMMAND = Command(
    "generate",
    "generate for a file of prompts; resumable",
    GenerateOptions,
    run,
    _DESCRIPTION,
    _EPILOG,
    interrupted=lambda args: f"the same command goes on from {args.output}",
    engine=True,
)

# What commands need that are not made of options yet; each goes with its last caller.
_SHOWN_BAD_LINES = 20
_LARGEST_SEED = (1 << 32) - 1


def add_files(parser: argparse.ArgumentParser, output: str) -> None:
    """Add what is read and written; ``output`` says what the output holds."""
    files = parser.add_argument_group("files")
    files.add_argument("--prompts", "-i", type=Path, required=True, help="the file of prompts")
    files.add_argument("--output", "-o", type=Path, required=True, help=output)
    files.add_argument("--format", choices=("auto", *FORMATS), default="auto")
    files.add_argument("--column", help="key or column that holds the prompt (else: by its name)")
    files.add_argument(
        "--on-bad-line",
        choices=("refuse", "skip"),
        default="refuse",
        help="refuse: generate nothing while the file has a bad line (default); skip: leave it out",
    )
    files.add_argument("--overwrite", action="store_true", help="throw away the output's content")


def report_bad_lines(bad: list[BadLine], args: argparse.Namespace, console: Console) -> None:
    """Name the bad lines; refuse the file unless they are to be skipped."""
    if not bad:
        return
    shown = [f"line {b.line}: {b.reason}" for b in bad[:_SHOWN_BAD_LINES]]
    if len(bad) > len(shown):
        shown.append(f"and {len(bad) - len(shown)} more")
    if args.on_bad_line == "refuse":
        raise PromptError(
            f"{args.prompts}: {len(bad)} bad lines; mend them, or pass --on-bad-line skip.\n  "
            + "\n  ".join(shown)
        )
    console.print(f"skipping {len(bad)} bad lines:", style="yellow")
    for text in shown:
        console.print(f"  {escape(text)}", soft_wrap=True)


def positive(text: str) -> int:
    """Parse an integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number from 1")
    return value


def from_zero(text: str) -> int:
    """Parse an integer from 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number from 0")
    return value


def seed_number(text: str) -> int:
    """Parse a seed that all generators take; -1 would be none to vLLM."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= _LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; use a whole number from 0 to {_LARGEST_SEED}"
        )
    return value


def at_least_zero(text: str) -> float:
    """Parse a number from 0, such as a temperature."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a number from 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # no comparison holds


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, such as engine arguments."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error.msg} at {error.pos + 1}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("use a JSON object such as '{\"enforce_eager\": true}'")
    return value
