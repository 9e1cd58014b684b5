"""`vllm-medusa distill`: the target continues prompts, and writes what its heads are trained on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.cli import generate
from vllm_medusa.cli.generate import positive, seed_number
from vllm_medusa.cli.progress import PromptProgress
from vllm_medusa.offline.acceptance import Acceptance
from vllm_medusa.offline.batch import Engine, run_batch
from vllm_medusa.offline.engine import EngineSettings, Sampling
from vllm_medusa.offline.prompts import BadLine, Prompt, PromptError, read_prompts
from vllm_medusa.offline.results import ResultLog, indices_of
from vllm_medusa.training.self_distillation import Plan, Summary

_MOST_SAMPLES = 10_000  # of a prompt

_DESCRIPTION = """\
Let the target write the texts that its heads are trained on: it continues every prompt of a file,
as often as wanted, through vLLM. Killed or interrupted, the same command goes on where it stopped;
the texts are those of an uninterrupted run (their lines stand in the order in which they were
finished)."""

_EPILOG = """\
Prompts: as for `generate`. "prompt" is continued as it stands, "messages" and "turns" are rendered
in the target's chat template.

Records: index, request_id, group, token_ids, generated ([start, end) of what the target wrote),
temperature, seed, finish_reason and text. A conversation is one record with a span for each answer;
where the template or the tokenizer renders an answer otherwise than it was written, the
conversation falls into several. Records of one prompt have one group, which no split divides."""


def add_parser(commands: Any) -> None:
    """Add this command to the subcommands of `vllm-medusa`."""
    parser = commands.add_parser(
        "distill",
        help="let the target write training texts for its heads; resumable",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="the target: a folder or a hub name")
    generate.add_files(parser, "records, as JSON lines")
    texts = parser.add_argument_group("texts")
    texts.add_argument("--samples", type=positive, default=1, metavar="N", help="of each prompt")
    texts.add_argument("--max-tokens", type=positive, default=512, help="of each answer (512)")
    texts.add_argument(
        "--temperature",
        type=_temperatures,
        default=(0.7,),
        metavar="T[,T...]",
        help="one, or several separated by commas; sample after sample takes the next (0.7)",
    )
    texts.add_argument(
        "--seed", type=seed_number, default=0, help="text i uses the seed SEED + i (0)"
    )
    texts.add_argument(
        "--self-talk", action="store_true", help="the target writes the user's later turns too"
    )
    texts.add_argument(
        "--turns", type=positive, metavar="N", help="answers in each --self-talk conversation (3)"
    )
    generate.add_sampling(texts)
    generate.add_medusa(parser, "plain vLLM. With heads the texts are the same")
    generate.add_engine(parser)
    parser.set_defaults(run=run, acceptance=None, ignore_eos=False)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status: 0, 1 if prompts failed, 2 for bad input."""
    return generate.run_resumable(args, _run)


def is_finished(args: argparse.Namespace, records: Path) -> bool:
    """Whether each text has its records or its error; status 1 alone may be of a crash as well.

    Args:
        args: ``prompts``, ``format``, ``column`` and ``samples`` of a command without self-talk.
        records: what it wrote so far.

    """
    _, _, turns = _survey(args)
    waiting = Plan(args.samples, turns=turns).slots(_usable(args), indices_of(records))
    return next(waiting, None) is None


def _run(args: argparse.Namespace, console: Console) -> int:
    from vllm_medusa.heads.provenance import provenance

    settings, sampling = _settings(args)
    prompts, bad, turns = _survey(args)
    generate.report_bad_lines(bad, args, console)
    if not prompts:
        raise PromptError(f"{args.prompts}: no prompts in it.")
    plan = Plan(args.samples, args.temperature, args.seed, args.turns or turns)
    if args.self_talk:
        plan = Plan(args.samples, args.temperature, args.seed, args.turns or 3, _talker(args))
    total = prompts * plan.samples
    texts = {
        "samples": plan.samples,
        "temperatures": list(plan.temperatures),
        "self_talk": args.self_talk,
        "turns": plan.turns,
    }
    origin = provenance(["vllm-medusa", *sys.argv[1:]], [args.prompts])
    with ResultLog(
        args.output,
        generate.depends_on(args, settings, sampling) | {"texts": texts},
        overwrite=args.overwrite,
        provenance=origin,
    ) as log:
        if log.torn_bytes:
            console.print(f"cut off an unfinished last line ({log.torn_bytes} bytes)")
        done = sum(index % plan.stride == 0 for index in log.done)
        if done:
            console.print(f"resuming: {done} of {total} texts are done")
        if done < total:
            seeded = any(plan.temperatures)
            engine = generate.start_engine(args, settings, sampling, seeded)
            try:
                _write(log, plan, engine, total, done, args, console)
            finally:
                engine.close()
        else:
            console.print("nothing to do")
        _report(args.output, console)
        return generate.report_failures(log, console)


def _settings(args: argparse.Namespace) -> tuple[EngineSettings, Sampling]:
    if args.speculative_model is None and (args.tree or args.num_speculative_tokens):
        raise PromptError("--tree and --num-speculative-tokens need heads: --speculative-model.")
    if args.turns is not None and not args.self_talk:
        raise PromptError(
            f"--turns {args.turns} is of --self-talk; else the prompts' own turns are answered."
        )
    if args.samples > _MOST_SAMPLES:
        raise PromptError(f"--samples {args.samples} is not allowed; use at most {_MOST_SAMPLES}.")
    of_zero = (slot for slot, value in enumerate(args.temperature) if value == 0)
    greedy = sum(len(range(slot, args.samples, len(args.temperature))) for slot in of_zero)
    if greedy > 1:
        shown = ",".join(f"{value:g}" for value in args.temperature)
        raise PromptError(
            f"--samples {args.samples} at temperature {shown} would be {greedy} times the same "
            "text at temperature 0; take fewer samples, or raise --temperature."
        )
    one = argparse.Namespace(**vars(args))
    one.temperature, one.no_medusa = args.temperature[0], args.speculative_model is None
    return generate.settings_of(one)


def _talker(args: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    from vllm_medusa.training.self_talk import require_self_talk

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise PromptError(
            f"--self-talk needs the target's tokenizer, and {args.model} has none that can be "
            f"read: {error}"
        ) from None
    require_self_talk(tokenizer)
    return tokenizer


def _survey(args: argparse.Namespace) -> tuple[int, list[BadLine], int]:
    """Read the prompts once: how many can be used, the bad lines, and the most turns of any."""
    usable, bad, turns = 0, [], 1
    for record in read_prompts(args.prompts, args.format, args.column):
        if isinstance(record, BadLine):
            bad.append(record)
        else:
            usable += 1
            turns = max(turns, len(record.turns))
    return usable, bad, turns


def _write(
    log: ResultLog,
    plan: Plan,
    engine: Engine,
    total: int,
    done: int,
    args: argparse.Namespace,
    console: Console,
) -> None:
    """Let the target write and keep each text as it is finished."""
    acceptance, tokens, early, ended = Acceptance(), 0, 0, 0
    start = time.perf_counter()
    slots = plan.slots(_usable(args), frozenset(log.done))
    cut = {"top_p": args.top_p} if args.top_p < 1 else {}
    cut |= {"top_k": args.top_k} if args.top_k > 0 else {}
    with PromptProgress(console, total, done) as progress:
        for result in run_batch(
            slots, engine, concurrency=args.batch, seed=plan.seed, session=plan.session
        ):
            if result.error is not None and not result.answers:
                generate.report_refusal(result, args, console)
            for record in plan.records(result):
                if record["index"] not in log.done:
                    log.append(record | cut)
            acceptance = Acceptance.total((acceptance, result.acceptance))
            tokens += result.num_tokens
            answers = sum(answer.role == "assistant" for answer in result.answers)
            early += args.self_talk and 0 < answers < plan.turns
            ended += bool(answers)
            progress.advance(tokens / (time.perf_counter() - start), acceptance.tau)
    seconds = time.perf_counter() - start
    tau = f", {acceptance.tau:.2f} tokens per step" if acceptance.tau else ""
    console.print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} a second){tau}",
        soft_wrap=True,
    )
    if early:
        console.print(
            f"{early} of {ended} conversations ended before their {plan.turns} answers: a text was "
            "cut at --max-tokens, or a user's turn was empty",
            style="yellow",
            soft_wrap=True,
        )


def _usable(args: argparse.Namespace) -> Iterator[Prompt]:
    for record in read_prompts(args.prompts, args.format, args.column):
        if isinstance(record, Prompt):
            yield record


def _report(output: Path, console: Console) -> None:
    """Print the counts and lengths of the whole file."""
    summary = Summary.of(output)
    lengths = summary.generated
    if lengths:
        console.print(
            f"{summary.records} records: {summary.prompt_tokens} prompt tokens, {sum(lengths)} "
            f"generated (of each {min(lengths)} to {max(lengths)}, mean "
            f"{sum(lengths) / len(lengths):.1f}); {summary.truncated / summary.records:.1%} "
            f"truncated, {summary.duplicates} duplicates, {summary.empty} empty",
            soft_wrap=True,
        )
    console.print(f"records in {output}", soft_wrap=True)


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(generate.at_least_zero(part) for part in text.split(","))
