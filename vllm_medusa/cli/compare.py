"""`vllm-medusa compare`: heads on a target, measured beside plain vLLM for several tree sizes."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vllm_medusa.cli import compare_report as report
from vllm_medusa.cli.generate import at_least_zero, json_object, positive, report_bad_lines
from vllm_medusa.cli.outputs import check_json
from vllm_medusa.offline.budgets import Budget, measure
from vllm_medusa.offline.defaults import engine_arguments
from vllm_medusa.offline.engine import EngineRefused, EngineSettings, Sampling, medusa_config
from vllm_medusa.offline.prompts import BadLine, Prompt, PromptError, read_prompts

if TYPE_CHECKING:
    from vllm_medusa.offline.records import Record

BUDGETS = (4, 8, 16, 32)
_PLAIN_SECONDS = 10.0  # between lines of progress where there is no terminal
_SHORT = 8  # tokens; a text whose first span starts before that has no prompt of its own
_TEXT_PROMPT = 32  # tokens of such a text that become the prompt

_DESCRIPTION = """\
Run the same prompts through plain vLLM and through vLLM with the heads, in turn, once for each size
of the heads' tree, and report whether every token agrees, the tokens per verification step (tau)
and the ratio of the throughputs. Exit status 1 if a token differs in float32."""

_EPILOG = """\
With --data the prompts are what stands before the first generated span of each record (greedy: each
distinct prompt once); sampling is at the records' temperature unless --temperature says otherwise.
Every request has a seed of its own.

A tree is listed best node first, so its first N nodes are the tree of that budget. Both engines
take turns, so a ratio says something on a busy machine too; tokens per second do not."""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "compare",
        help="heads beside plain vLLM: same tokens? how fast, for each size of the tree",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="a folder or a hub name")
    parser.add_argument("heads", help="a folder, a file or a hub name")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--data", type=Path, metavar="RECORDS", help="a file of records")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="a file of prompts")
    parser.add_argument("--on-bad-line", choices=("refuse", "skip"), default="refuse")
    parser.add_argument("--limit", type=positive, default=32, help="use the first prompts (32)")
    parser.add_argument("--tree", help="instead of the one in the heads' config")
    parser.add_argument(
        "--budgets",
        type=positive,
        nargs="+",
        default=list(BUDGETS),
        metavar="N",
        help=f"numbers of draft nodes ({' '.join(map(str, BUDGETS))})",
    )
    parser.add_argument("--temperature", type=at_least_zero, help="(that of the records, or 0)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="of each answer (128)")
    parser.add_argument("--seed", type=int, default=0, help="prompt i uses SEED + i (0)")
    parser.add_argument("--batch", type=positive, default=1, help="prompts at a time (1)")
    parser.add_argument("--rounds", type=positive, default=3, help="repetitions (3)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=positive)
    parser.add_argument(
        "--engine-args", type=json_object, default={}, metavar="JSON", help="more LLM arguments"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, 1 if a token differs in float32, 2 for bad input."""
    from vllm_medusa.heads import HeadsError
    from vllm_medusa.job import JobFailed

    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    try:
        return _run(args, console, errors)
    except (EngineRefused, HeadsError, OSError, ValueError) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 2
    except JobFailed as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; nothing was written")
        return 130


def _run(args: argparse.Namespace, console: Console, errors: Console) -> int:
    if args.output is not None and not args.output.parent.is_dir():
        raise PromptError(f"{args.output}: no folder {args.output.parent}. Make it first.")
    if args.output is not None:
        check_json(args.output, "figures", report.is_document)
    tree, budgets = budgets_of(args)
    prompts, temperature = prompts_of(args, errors)
    sampling = Sampling(max_tokens=args.max_tokens, temperature=temperature)
    engine_args = engine_arguments(
        args.target, prompts, args.max_tokens, args.batch, args.max_model_len, engines=2
    )
    engine_args |= args.engine_args
    document = report.opening(args, prompts, temperature, budgets, engine_args)
    console.print(report.setting(document), soft_wrap=True)
    measured = measure_budgets(args, engine_args, prompts, sampling, tree, budgets, errors)
    document["rows"] = [budget.to_dict() for budget in measured]
    document["fastest"] = report.fastest(document["rows"])
    document["dtype"] = args.dtype
    console.print(report.table(document))
    console.print(report.conclusion(document), soft_wrap=True)
    if args.output is not None:
        part = args.output.with_name(args.output.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(part, args.output)
        console.print(f"figures in {args.output}", soft_wrap=True)
    identical = all(row["identical"] for row in document["rows"])
    return 0 if identical or document["dtype"] != "float32" else 1


def budgets_of(args: argparse.Namespace) -> tuple[list[list[int]] | None, list[int]]:
    """The tree asked for (None: the heads' own) and the budgets it allows, ascending.

    Raises:
        HeadsError: the heads can't be read.
        MedusaConfigError: the tree doesn't fit them.

    """
    from vllm_medusa.config import TreeConfig
    from vllm_medusa.heads import peek_heads

    info = peek_heads(args.heads)
    wanted = medusa_config(None, args.tree).get("tree")
    tree = TreeConfig.resolve(wanted, info.tree, info.num_heads, info.draft_vocab_size)
    budgets = sorted({min(budget, tree.num_draft_tokens) for budget in args.budgets})
    return (None if wanted is None else tree.to_lists()), budgets


def prompts_of(args: argparse.Namespace, errors: Console) -> tuple[list[Prompt], float]:
    """The prompts and the temperature: that asked for, that of the records, or 0.

    Raises:
        PromptError: no usable prompt, or bad lines that are not to be skipped.

    """
    if args.data is not None:
        return _prompts_of_records(args, errors)
    records = list(read_prompts(args.prompts))
    bad = [record for record in records if isinstance(record, BadLine)]
    report_bad_lines(bad, args, errors)
    prompts = [record for record in records if isinstance(record, Prompt)]
    if not prompts:
        raise PromptError(f"{args.prompts}: no prompts in it.")
    return prompts[: args.limit], args.temperature or 0.0


def _prompts_of_records(args: argparse.Namespace, errors: Console) -> tuple[list[Prompt], float]:
    from transformers import AutoTokenizer

    from vllm_medusa.offline.records import load_records

    records, bad = load_records(args.data, AutoTokenizer.from_pretrained(args.target))
    args.prompts = args.data  # what messages about bad lines name
    report_bad_lines(bad, args, errors)
    if not records:
        raise PromptError(f"{args.data}: no records in it.")
    temperatures = sorted({r.temperature for r in records if r.temperature is not None})
    if len(temperatures) > 1 and args.temperature is None:
        raise PromptError(
            f"{args.data} was sampled at the temperatures {', '.join(map(str, temperatures))}; say "
            "which to measure at with --temperature."
        )
    temperature = (temperatures or [0.0])[0] if args.temperature is None else args.temperature
    return _prompts_in_turn(records, args, sampled=temperature > 0), temperature


def _prompts_in_turn(
    records: Sequence[Record], args: argparse.Namespace, *, sampled: bool
) -> list[Prompt]:
    """Each distinct prompt once, then those of second samples, and so on; greedy: once."""
    again: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, int, Record, tuple[int, ...]]] = []
    for place, record in enumerate(records):
        start = record.generated[0][0]
        if start < _SHORT:
            start = min(_TEXT_PROMPT, max(1, len(record.token_ids) // 2))
        ids = record.token_ids[:start]
        turns.append((again[ids], place, record, ids))
        again[ids] += 1
    kept = [turn for turn in sorted(turns, key=lambda t: t[:2]) if sampled or turn[0] == 0]
    return [
        Prompt(number, record.line, f"{args.data.name}:{record.line}", token_ids=ids)
        for number, (_, _, record, ids) in enumerate(kept[: args.limit])
    ]


def measure_budgets(
    args: argparse.Namespace,
    engine_args: dict[str, Any],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    tree: list[list[int]] | None,
    budgets: Sequence[int],
    errors: Console,
) -> list[Budget]:
    """Measure every budget beside the same plain engine, one after another.

    Raises:
        EngineRefused: vLLM or the plugin refuses to start.
        JobFailed: an engine ended.
        ValueError: an engine refuses a prompt.

    """
    from vllm_medusa.offline.process import EngineProcess

    def start(name: str, speculation: dict[str, Any] | None) -> EngineProcess:
        task = bar.add_task(f"starting {name}", total=None)
        bar.refresh()
        if not errors.is_terminal:
            errors.print(f"starting {name}")
        settings = EngineSettings(
            args.target, speculation, args.dtype, args.max_model_len, engine_args
        )
        engine = EngineProcess(settings, sampling)
        bar.update(task, total=1, completed=1, refresh=True)
        return engine

    measured = []
    said = time.perf_counter()

    def advance(task: TaskID) -> None:
        nonlocal said
        bar.update(task, advance=1, refresh=True)
        if not errors.is_terminal and time.perf_counter() - said > _PLAIN_SECONDS:
            said = time.perf_counter()
            now = bar.tasks[task]
            errors.print(f"{now.description}: {now.completed:.0f}/{groups}")

    groups = args.rounds * -(-len(prompts) // args.batch)
    bar = Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=errors,
        auto_refresh=False,  # no thread of its own beside what is being measured
    )
    with bar, start("plain vLLM", None) as plain:
        for budget in budgets:
            config = {**medusa_config(str(args.heads), None, None, budget)}
            if tree is not None:
                config["tree"] = tree
            with start(f"vLLM with {budget} draft nodes", config) as medusa:
                task = bar.add_task(f"plain and {budget} draft nodes in turn", total=groups)
                measured.append(
                    measure(
                        plain,
                        medusa,
                        budget,
                        prompts,
                        concurrency=args.batch,
                        seed=args.seed,
                        rounds=args.rounds,
                        progress=partial(advance, task),
                    )
                )
            if not errors.is_terminal:
                errors.print(f"{budget} draft nodes: {measured[-1].ratio:.2f} times plain vLLM")
        args.dtype = plain.dtype
    return measured
