"""`vllm-medusa generate`: a file of prompts in, a file of results out, resumable at any moment."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vllm_medusa.cli.progress import PromptProgress
from vllm_medusa.config import run_engines_in_this_process
from vllm_medusa.offline.acceptance import Acceptance
from vllm_medusa.offline.batch import Engine, Result, run_batch
from vllm_medusa.offline.engine import (
    EngineRefused,
    EngineSettings,
    Sampling,
    VllmEngine,
    medusa_config,
)
from vllm_medusa.offline.prompts import (
    FORMATS,
    BadLine,
    Prompt,
    PromptError,
    detect_format,
    read_prompts,
)
from vllm_medusa.offline.quiet import stderr_to_log
from vllm_medusa.offline.results import ResultError, ResultLog, digest_of, fingerprint

_SHOWN_BAD_LINES = 20
_LARGEST_SEED = (1 << 32) - 1

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


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "generate",
        help="generate for a file of prompts; resumable",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("model", help="the target: a folder or a hub name")
    add_files(parser, "results, as JSON lines")
    medusa = add_medusa(parser)
    medusa.add_argument("--acceptance", help="lossless (default), typical, or JSON")
    medusa.add_argument("--no-medusa", action="store_true", help="plain vLLM")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=positive, default=256)
    sampling.add_argument("--temperature", type=at_least_zero, default=0.0)
    sampling.add_argument("--seed", type=int, help="prompt i uses the seed SEED + i")
    sampling.add_argument("--ignore-eos", action="store_true")
    add_sampling(sampling)
    add_engine(parser)


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


def add_medusa(
    parser: argparse.ArgumentParser, absent: str = "those in the target's folder"
) -> argparse._ArgumentGroup:
    """Add the options of speculation; ``absent`` says what is used without any heads."""
    medusa = parser.add_argument_group("Medusa")
    medusa.add_argument("--speculative-model", metavar="HEADS", help=f"heads; absent: {absent}")
    medusa.add_argument(
        "--tree", help="preset name, JSON file, or JSON such as '{\"dense\":[4,2]}'"
    )
    medusa.add_argument("--num-speculative-tokens", type=positive, metavar="N")
    return medusa


def add_sampling(sampling: argparse._ArgumentGroup) -> None:
    """Add the sampling options that all jobs share."""
    sampling.add_argument("--top-p", type=_share, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0, help="0 or -1: all tokens")
    sampling.add_argument("--stop", action="append", default=[], help="stop text; may be repeated")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options of vLLM's engine."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--batch", type=positive, default=64, help="prompts at a time (64)")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--max-model-len", type=positive)
    engine.add_argument(
        "--engine-args", type=json_object, default={}, metavar="JSON", help="more LLM arguments"
    )
    engine.add_argument("--log-level", help="show vLLM's log from this level on, such as INFO")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 1 if prompts failed, 2 for bad input."""
    return run_resumable(args, _run)


def run_resumable(
    args: argparse.Namespace, job: Callable[[argparse.Namespace, Console], int]
) -> int:
    """Run a job over prompts and return its exit status; bad input and interruptions are told."""
    # its own handle: standard error goes to a log while the engine starts
    with os.fdopen(os.dup(2), "w") as terminal:
        console = Console(file=terminal, highlight=False)
        try:
            return job(args, console)
        except (PromptError, ResultError, EngineRefused, OSError) as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            return 2
        except KeyboardInterrupt:
            console.print(f"interrupted; the same command goes on from {args.output}")
            return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    settings, sampling = settings_of(args)
    total, bad = survey(args.prompts, args.format, args.column)
    report_bad_lines(bad, args, console)
    if total == 0:
        raise PromptError(f"{args.prompts}: no prompts in it.")
    with ResultLog(
        args.output, depends_on(args, settings, sampling), overwrite=args.overwrite
    ) as log:
        if log.torn_bytes:
            console.print(f"cut off an unfinished last line ({log.torn_bytes} bytes)")
        if log.done:
            console.print(f"resuming: {len(log.done)} of {total} prompts are done")
        if len(log.done) >= total:
            console.print(f"nothing to do; the results are in {args.output}", soft_wrap=True)
            return report_failures(log, console)
        engine = start_engine(
            args, settings, sampling, args.seed is not None and args.temperature > 0
        )
        try:
            waiting = pending(args.prompts, args.format, args.column, log.done)
            write_results(log, waiting, engine, total, args, console)
        finally:
            engine.close()
        return report_failures(log, console)


def depends_on(
    args: argparse.Namespace, settings: EngineSettings, sampling: Sampling
) -> dict[str, Any]:
    """What the results depend on: those of other settings are never mixed into one file."""
    format = detect_format(args.prompts) if args.format == "auto" else args.format
    return {
        "prompts_sha256": digest_of(args.prompts),
        # None: older files don't tell it, and are mostly of JSON lines
        "format": None if format == "jsonl" else format,
        "checkpoints": {
            name: fingerprint(Path(name))
            for name in (args.model, args.speculative_model)
            if name is not None and Path(name).exists()
        },
        "tree_sha256": digest_of(Path(args.tree)) if _is_file(args.tree) else None,
        "column": args.column,
        "engine": settings.to_dict(),
        "sampling": asdict(sampling) | {"seed": args.seed},
    }


def start_engine(
    args: argparse.Namespace, settings: EngineSettings, sampling: Sampling, seeded: bool
) -> VllmEngine:
    """Start the engine, its log out of sight unless it is wanted."""
    run_engines_in_this_process()
    with stderr_to_log(args.log_level is None):
        return VllmEngine(settings, sampling, seeded=seeded, log_level=args.log_level or "ERROR")


def report_failures(log: ResultLog, console: Console) -> int:
    """Say how many prompts of the file have an error for a result; the exit status."""
    if log.failed:
        console.print(
            f"{log.failed} prompts could not be run; their lines have an 'error'. To try them "
            "again, remove these lines and repeat the command."
        )
    return 1 if log.failed else 0


def settings_of(args: argparse.Namespace) -> tuple[EngineSettings, Sampling]:
    """Engine and sampling settings from the command line."""
    options = (args.speculative_model, args.tree, args.acceptance, args.num_speculative_tokens)
    if args.no_medusa and any(option is not None for option in options):
        raise PromptError("--no-medusa contradicts the other Medusa options; drop one of them.")
    try:
        config = None if args.no_medusa else medusa_config(*options)
    except ValueError as error:
        raise PromptError(str(error)) from None
    settings = EngineSettings(
        args.model, config, args.dtype, args.max_model_len, dict(args.engine_args)
    )
    sampling = Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    return settings, sampling


def survey(path: Path, format: str, column: str | None) -> tuple[int, list[BadLine]]:
    """Read the file of prompts once: the number of usable prompts, and the bad lines."""
    total = 0
    bad = []
    for record in read_prompts(path, format, column):
        if isinstance(record, BadLine):
            bad.append(record)
        else:
            total += 1
    return total, bad


def pending(path: Path, format: str, column: str | None, done: set[int]) -> Iterator[Prompt]:
    """The usable prompts that have no result yet."""
    for record in read_prompts(path, format, column):
        if isinstance(record, Prompt) and record.index not in done:
            yield record


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


def write_results(
    log: ResultLog,
    prompts: Iterator[Prompt],
    engine: Engine,
    total: int,
    args: argparse.Namespace,
    console: Console,
) -> None:
    """Generate, write each result as it comes, and report."""
    acceptance, tokens = Acceptance(), 0
    start = time.perf_counter()
    with PromptProgress(console, total, len(log.done)) as progress:
        for result in run_batch(prompts, engine, concurrency=args.batch, seed=args.seed):
            if result.error is not None:
                report_refusal(result, args, console)
            log.append(result.to_dict())
            acceptance = Acceptance.total((acceptance, result.acceptance))
            tokens += result.num_tokens
            progress.advance(tokens / (time.perf_counter() - start), acceptance.tau)
    seconds = time.perf_counter() - start
    tau = f", {acceptance.tau:.2f} tokens per step" if acceptance.tau else ""
    console.print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} a second){tau}; "
        f"results in {args.output}",
        soft_wrap=True,
    )


def report_refusal(result: Result, args: argparse.Namespace, console: Console) -> None:
    """Tell of a prompt that the engine refuses; stop there unless such are to be skipped."""
    message = f"{args.prompts}, line {result.prompt.line}: {result.error}"
    if args.on_bad_line == "refuse":
        raise PromptError(f"{message}\nFinished prompts are kept. Pass --on-bad-line skip.")
    console.print(f"[yellow]skipped[/] {escape(message)}", soft_wrap=True)


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


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use more than 0, at most 1")
    return value


def _is_file(tree: str | None) -> bool:
    try:
        return tree is not None and Path(tree).is_file()
    except OSError:  # JSON text is too long for a name
        return False


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


def main() -> None:
    """Run this command alone, as `examples/offline_batch.py` does."""
    parser = argparse.ArgumentParser(
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
