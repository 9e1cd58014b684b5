"""Tokens per step with heads, with lookup and with both in one tree, all of one number of nodes.

    python -m benchmarks lookup TARGET HEADS --texts demo/prompts.jsonl MORE.jsonl

Tokens have to be plain vLLM's. Counts depend on nothing but the texts: no quiet machine is needed.
What stands behind +- is the standard error from prompt to prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arms import PLAIN, Arm, ArmOptions
from benchmarks.case import ROOT, Case, Row
from benchmarks.tau import answers, differing, figures
from vllm_medusa.job import Progress
from vllm_medusa.options import Dtype, Positive, option


class LookupOptions(ArmOptions):
    """What is measured."""

    texts: tuple[Path, ...] = option(
        "files of prompts", default=(ROOT / "demo" / "prompts.jsonl",), shown="demo/prompts.jsonl"
    )
    nodes: Positive = option("draft nodes of a request", default=15)
    prompts: Positive = option("of each file", default=16)
    max_tokens: Positive = option("of each answer", default=96)
    batch: tuple[Positive, ...] = option("requests at a time; changes little", default=(8,))
    dtype: Dtype = option(default="float32")


def arms(options: LookupOptions) -> list[Arm]:
    """Heads alone, lookup alone, both."""
    heads = {"model": str(options.heads.absolute())}
    kinds: dict[str, dict[str, Any]] = {
        "heads": heads,
        "lookup": {"lookup": True},
        "both": heads | {"lookup": True},
    }
    common = {"method": "medusa", "budget": options.nodes}
    return [Arm(name, "ours", options.nodes, common | own) for name, own in kinds.items()]


def run(options: LookupOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, temperature and file of prompts."""
    yield from rows(arms(options), options, progress)


def rows(chosen: Sequence[Arm], options: LookupOptions, progress: Progress) -> Iterator[Row]:
    """Decode all texts with each arm."""
    texts = {path.stem: replace(options, prompt_file=path).read_prompts() for path in options.texts}
    wanted = answers(PLAIN, options, texts)
    for arm in chosen:
        progress.note(arm.name)
        for (temperature, name), results in answers(arm, options, texts).items():
            what: dict[str, Any] = {
                "name": f"{arm.name}, T {temperature:g}, {name}",
                "arm": arm.name,
            }
            what |= {"temperature": temperature, "texts": name}
            counts = [(r.acceptance.accepted, r.acceptance.steps) for r in results]
            wrong = differing(results, wanted[temperature, name])
            reason = f"{wrong} of {len(results)} answers differ from plain vLLM's" if wrong else ""
            yield Row(what, figures(counts), right=not wrong, failed=reason)


CASE = Case(
    LookupOptions,
    run,
    {
        "texts": ("texts", ""),
        "temperature": ("T", "g"),
        "arm": ("drafts of", ""),
        "tau": ("tau", ".2f"),
        "tau_error": ("+-", ".2f"),
        "steps": ("steps", "d"),
        "requests": ("answers equal to plain's", "d"),
    },
    quick={"prompts": 4, "max_tokens": 32},
    bars=("tau",),
)
