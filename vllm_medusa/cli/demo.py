"""`vllm-medusa demo`: plain vLLM and tree Medusa on the same prompts in one run, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vllm_medusa.cli import demo_report as report
from vllm_medusa.cli.generate import at_least_zero, positive
from vllm_medusa.config import run_engines_in_this_process
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.compare import compare
from vllm_medusa.offline.engine import (
    EngineRefused,
    EngineSettings,
    Sampling,
    VllmEngine,
    medusa_config,
)
from vllm_medusa.offline.prompts import Prompt, PromptError, read_prompts
from vllm_medusa.offline.quiet import stderr_to_log

_DEMO = Path(__file__).resolve().parents[2] / "demo"
_SEED = 20_000

# No compiler is needed, both engines start in seconds, and every round does the same work.
_ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 1 << 29,
}


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "demo",
        help="plain vLLM beside tree Medusa: same tokens, fewer steps",
        description="Generate for the demo prompts with plain vLLM and with tree Medusa, compare "
        "every token and report the speed. Exit status 1 if any token differs.",
    )
    parser.add_argument("--target", type=Path, default=_DEMO / "target")
    parser.add_argument("--heads", type=Path, default=_DEMO / "heads")
    parser.add_argument("--prompts", type=Path, default=_DEMO / "prompts.jsonl")
    parser.add_argument("--tree", help="instead of the one in the heads' config")
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="at most N draft nodes"
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="B", help="prompts at a time (1)"
    )
    parser.add_argument("--max-tokens", type=positive, default=96)
    parser.add_argument("--temperature", type=at_least_zero, default=0.8)
    parser.add_argument("--limit", type=positive, help="use only the first prompts")
    parser.add_argument(
        "--rounds", type=positive, default=2, help="repetitions of the sampled part"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="float32 (default) must give identical tokens; in bfloat16 a near-tie may fall "
        "otherwise when a matrix product has more rows, so differences are only reported",
    )
    parser.add_argument("--texts", type=int, default=2, help="texts shown")
    parser.add_argument("--no-medusa", action="store_true", help="plain vLLM on both sides")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0 if all tokens are identical, 1 if not, 2 for bad input.

    In bfloat16 differing tokens are reported and do not count.
    """
    console = Console(highlight=False)
    try:
        return _run(args, console)
    except (PromptError, EngineRefused) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2


def _run(args: argparse.Namespace, console: Console) -> int:
    prompts = load_prompts(args)
    run_engines_in_this_process()  # two engine processes would share the cores while one is timed
    config = (
        None
        if args.no_medusa
        else medusa_config(
            str(args.heads), args.tree, num_speculative_tokens=args.num_speculative_tokens
        )
    )
    sampled = Sampling(max_tokens=args.max_tokens, temperature=args.temperature)
    greedy = Sampling(max_tokens=args.max_tokens)

    heads = None if args.no_medusa else args.heads
    report.opening(console, args.target, heads, prompts, sampled, args.dtype)
    engines = []
    # Medusa first: what is wrong with its options shows at once
    with stderr_to_log(), _status(console) as status:
        for name, speculation in (("vLLM with tree Medusa", config), ("plain vLLM", None)):
            task = status.add_task(f"starting {name}", total=None)
            settings = EngineSettings(
                str(args.target), speculation, args.dtype, engine_args=_ENGINE_ARGS
            )
            engines.append(VllmEngine(settings, sampled, seeded=True))
            status.update(task, total=1, completed=1)
    medusa, plain = engines
    plans = [
        plan
        for batch in args.batch
        for plan in (
            (f"sampled, batch {batch}", sampled, batch, args.rounds),
            (f"greedy, batch {batch}", greedy, batch, 1),
        )
    ]
    rows = []
    with _status(console, quiet=True) as status:
        warm = status.add_task("warming up", total=2 * len(plans))
        for _, sampling, concurrency, _ in plans:
            for engine in engines:
                engine.sampling = sampling
                list(run_batch(prompts[:concurrency], engine, concurrency=concurrency, seed=0))
                _advance(status, warm)
        for name, sampling, concurrency, rounds in plans:
            plain.sampling = medusa.sampling = sampling
            groups = rounds * -(-len(prompts) // concurrency)
            task = status.add_task(name, total=groups)
            comparison = compare(
                plain,
                medusa,
                prompts,
                concurrency=concurrency,
                seed=_SEED,
                rounds=rounds,
                progress=lambda task=task: _advance(status, task),  # type: ignore[misc]
            )
            rows.append(report.Row(name, comparison))
    shown = [rows[0].comparison.candidate.results[p.index] for p in prompts[: args.texts]]
    if shown:
        report.texts(console, shown, medusa.pieces)
    report.figures(console, rows)
    report.histogram(console, rows[0])
    identical = report.verdict(console, rows)
    for engine in engines:
        engine.close()
    if not identical and args.dtype != "float32":
        report.near_ties(console)
        return 0
    return 0 if identical else 1


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The demo's prompts; every file the demo needs is looked for first.

    Raises:
        PromptError: a file is missing or a prompt can't be used.

    """
    needed: Sequence[Path] = (args.target, args.prompts)
    if not args.no_medusa:
        needed = (*needed, args.heads)
    for path in needed:
        if not path.exists():
            raise PromptError(
                f"{path} does not exist. The demo's model, heads and prompts come with the "
                "repository: run it from a clone, or name yours with --target, --heads, --prompts."
            )
    prompts = []
    for record in read_prompts(args.prompts):
        if not isinstance(record, Prompt):
            raise PromptError(f"{args.prompts}, line {record.line}: {record.reason}")
        prompts.append(record)
    if not prompts:
        raise PromptError(f"{args.prompts}: no prompts in it.")
    return prompts[: args.limit]


def _advance(status: Progress, task: TaskID) -> None:
    status.advance(task)
    status.refresh()


def _status(console: Console, *, quiet: bool = False) -> Progress:
    """A progress display; a quiet one has no thread of its own beside what is being measured."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=not quiet,
    )
