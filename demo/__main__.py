"""`python -m demo`: a chat model in plain vLLM and with tree drafts, replayed side by side.

Only one engine generates at a time. To measure your own drafters, use `vllm-medusa compare`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo import packed, report, smollm2
from demo.engines import record
from demo.recording import FORMAT, Recording
from demo.replay import replay
from demo.svg import draw
from vllm_medusa.cli.console import ConsoleProgress, run_job, stdout_console
from vllm_medusa.files import refuse_to_replace, require_parent
from vllm_medusa.job import Progress
from vllm_medusa.offline.engine import check_drafter, medusa_config
from vllm_medusa.offline.machine import describe_machine
from vllm_medusa.offline.options import check_speculation
from vllm_medusa.offline.prompts import load_prompts
from vllm_medusa.options import (
    AtLeastZero,
    FromZero,
    Options,
    Positive,
    add_flags,
    from_flags,
    option,
)

_HERE = Path(__file__).resolve().parent


class DemoOptions(Options):
    """Options of `python -m demo`."""

    target: Path | None = option(
        "folder of a chat model; default: SmolLM2-135M-Instruct, built in .demo", default=None
    )
    drafter: Path = option(
        "folder of its drafter", default=_HERE / "drafters" / "hydra", shown="Hydra heads"
    )
    speculative_config: dict[str, Any] = option(
        "additional settings, such as '{\"lookup\": true}'", default={}, metavar="JSON"
    )
    prompts: Path = option("a file of prompts", default=_HERE / "prompts.jsonl", shown="")
    max_tokens: Positive = option("tokens per answer", default=64)
    temperatures: tuple[AtLeastZero, ...] = option(default=(0.0, 0.7), metavar="T")
    eager: bool = option("disable compilation: faster start, slower decoding", default=False)
    replays: FromZero = option("number of answers to replay", default=2)
    json: Path | None = option("file for the recording", default=None, metavar="FILE")
    record: Path | None = option("draw the replay as an SVG", default=None, metavar="FILE")
    recorded: Path | None = option(
        "show a recording instead of running engines", "--from", default=None, metavar="FILE"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0, 1 if a token differs, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Answer the demo's prompts with plain vLLM and with tree drafts, replay both "
        "side by side, compare every token and report the speed. Exit status 1 if a token differs.",
    )
    add_flags(parser, DemoOptions)
    args = parser.parse_args(arguments)
    return run_job(
        lambda progress: show(from_flags(DemoOptions, args), progress),
        interrupted="nothing was written",
    )


def show(options: DemoOptions, progress: ConsoleProgress) -> int:
    """Run both engines or read a recording, and show the result; returns the exit status."""
    if options.json:
        refuse_to_replace(options.json, "recording", lambda found: found.get("format") == FORMAT)
    if options.record:
        require_parent(options.record)
        if options.record.suffix != ".svg" or options.record.is_dir():
            raise ValueError(
                f"--record {options.record}: pass the name of a file that ends in .svg."
            )
    if options.recorded:
        recording = Recording.load(options.recorded)
    else:
        recording = run(options, progress)
    if options.json:
        recording.save(options.json)
    shown = recording.shown(options.replays)
    if options.record:
        options.record.write_text(draw(recording, shown), encoding="utf-8")
    console = stdout_console()
    if console.is_terminal:
        replay(console, recording, shown)
    else:
        report.texts(console, shown)
    report.figures(console, recording)
    return 0 if report.verdict(console, recording) else 1


def run(options: DemoOptions, progress: Progress) -> Recording:
    """Record both engines."""
    for name in ("target", "drafter", "prompts"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            raise ValueError(f"--{name} {path} does not exist; set --{name}.")
    if options.target is not None and not (options.target / "config.json").is_file():
        raise ValueError(
            f"--target {options.target}: no config.json in it; pass the folder of a chat model "
            "in transformers' format, not a GGUF file."
        )
    prompts = load_prompts(options.prompts)
    target = options.target or smollm2.build(smollm2.MADE / "target", note=progress.note)
    drafter = packed.usable(options.drafter, target)
    config = medusa_config(str(drafter), options.speculative_config)
    check_speculation(config)
    check_drafter({"model": str(target), "speculative_config": config})
    machine = describe_machine()
    eager = options.eager
    if not eager and not (shutil.which("g++") or shutil.which("clang++")):
        progress.warn("no C++ compiler found: both engines run eagerly, as with --eager.")
        eager = True
    return Recording(
        target="SmolLM2-135M-Instruct" if options.target is None else target.name,
        drafter=options.drafter.name,
        machine=f"{machine['cores']} cores of {machine['cpu']}{', eager' if eager else ''}",
        runs=record(
            target,
            config,
            prompts,
            options.temperatures,
            options.max_tokens,
            {
                "enforce_eager": eager,
                "enable_prefix_caching": False,
                "kv_cache_memory_bytes": 1 << 29,
                "max_model_len": -1,  # the longest that fits into the cache
            },
            progress,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
