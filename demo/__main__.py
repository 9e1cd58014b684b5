"""`python -m demo`: plain vLLM and tree Medusa on the same prompts in one run, side by side.

`make demo` runs it on the repository's model, made larger. To measure heads of your own, use
`vllm-medusa compare`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from demo import report
from vllm_medusa.cli.console import ConsoleProgress, run_job
from vllm_medusa.cli.flags import add_flags, from_flags
from vllm_medusa.config import run_engines_in_this_process
from vllm_medusa.offline.batch import run_batch
from vllm_medusa.offline.engine import EngineSettings, Sampling, VllmEngine, medusa_config
from vllm_medusa.offline.in_turn import run_in_turn
from vllm_medusa.offline.prompts import Prompt, load_prompts
from vllm_medusa.offline.quiet import stderr_to_log
from vllm_medusa.options import AtLeastZero, FromZero, Options, Positive, option

_HERE = Path(__file__).resolve().parent
_SEED = 20_000

# No compiler is needed, both engines start in seconds, and every round does the same work.
_ENGINE_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 1 << 29,
}


class DemoOptions(Options):
    """Options of `python -m demo`."""

    target: Path = option(default=_HERE / "target", shown="")
    heads: Path = option(default=_HERE / "heads", shown="")
    prompts: Path = option(default=_HERE / "prompts.jsonl", shown="")
    tree: str | None = option("a static tree instead of dynamic ones", default=None)
    num_speculative_tokens: Positive | None = option(
        "at most N draft nodes", default=None, metavar="N"
    )
    batch: tuple[Positive, ...] = option("prompts at a time", default=(1,), metavar="B")
    max_tokens: Positive = option(default=96)
    temperature: AtLeastZero = option(default=0.8)
    limit: Positive | None = option("use only the first prompts", default=None)
    rounds: Positive = option("repetitions of the sampled part", default=2)
    dtype: Literal["float32", "bfloat16"] = option(
        "in float32 a different token is a failure; in bfloat16 near-ties may differ",
        default="float32",
    )
    texts: FromZero = option("texts shown", default=2)
    no_medusa: bool = option("plain vLLM on both sides", default=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0, 1 if a token differs in float32, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Generate for the demo prompts with plain vLLM and with tree Medusa, compare "
        "every token and report the speed. Exit status 1 if any token differs.",
    )
    add_flags(parser, DemoOptions)
    args = parser.parse_args(arguments)
    return run_job(
        lambda progress: show(from_flags(DemoOptions, args), progress),
        interrupted="nothing was written",
        engine=True,
    )


def show(options: DemoOptions, progress: ConsoleProgress) -> int:
    """Run both engines in turn, print texts, figures and verdict; the exit status."""
    heads = None if options.no_medusa else options.heads
    for path in filter(None, (options.target, heads, options.prompts)):
        if not path.exists():
            raise ValueError(
                f"{path} does not exist; name yours with --target, --heads and --prompts."
            )
    prompts = load_prompts(options.prompts)[: options.limit]
    console = Console(highlight=False)
    sampled = Sampling(max_tokens=options.max_tokens, temperature=options.temperature)
    greedy = Sampling(max_tokens=options.max_tokens)
    report.opening(console, options.target, heads, prompts, sampled, options.dtype)
    plans = [
        plan
        for batch in options.batch
        for plan in (
            (f"sampled, batch {batch}", sampled, batch, options.rounds),
            (f"greedy, batch {batch}", greedy, batch, 1),
        )
    ]
    with ExitStack() as engines:
        # Medusa first: what is wrong with its options shows at once
        medusa = engines.enter_context(closing(_start(options, sampled, heads, progress)))
        plain = engines.enter_context(closing(_start(options, sampled, None, progress)))
        for _, sampling, batch, _ in plans:  # warm up
            for engine in (medusa, plain):
                engine.sampling = sampling
                list(run_batch(prompts[:batch], engine, concurrency=batch, seed=0))
        rows = []
        for name, sampling, batch, rounds in plans:
            plain.sampling = medusa.sampling = sampling
            rows.append(_row(name, plain, medusa, prompts, batch, rounds, progress))
        shown = [rows[0].comparison.candidate.results[p.index] for p in prompts[: options.texts]]
        if shown:
            report.texts(console, shown, medusa.pieces)
    report.figures(console, rows)
    report.histogram(console, rows[0])
    if report.verdict(console, rows):
        return 0
    if options.dtype == "float32":
        return 1
    report.near_ties(console)
    return 0


def _start(
    options: DemoOptions, sampling: Sampling, heads: Path | None, progress: ConsoleProgress
) -> VllmEngine:
    config = None
    if heads is not None:
        config = medusa_config(
            str(heads), options.tree, num_speculative_tokens=options.num_speculative_tokens
        )
    progress.note(f"starting {'plain vLLM' if config is None else 'vLLM with tree Medusa'}")
    run_engines_in_this_process()  # two engine processes would share the cores while one is timed
    settings = EngineSettings(str(options.target), config, options.dtype, engine_args=_ENGINE_ARGS)
    with stderr_to_log():
        return VllmEngine(settings, sampling, seeded=True)


def _row(
    name: str,
    plain: VllmEngine,
    medusa: VllmEngine,
    prompts: list[Prompt],
    batch: int,
    rounds: int,
    progress: ConsoleProgress,
) -> report.Row:
    done, groups = count(1), rounds * -(-len(prompts) // batch)
    comparison = run_in_turn(
        plain,
        medusa,
        prompts,
        concurrency=batch,
        seed=_SEED,
        rounds=rounds,
        progress=lambda: progress.at(name, next(done), groups),
    )
    return report.Row(name, comparison)


if __name__ == "__main__":
    sys.exit(main())
