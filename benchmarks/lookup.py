"""Tokens per step with heads, with lookup and with both in one tree, all of one number of nodes.

    python -m benchmarks lookup TARGET HEADS --texts tests/assets/prompts.jsonl MORE.jsonl

HEADS may be an EAGLE drafter. Gains are those above the heads alone; a share is the part of all
accepted tokens that lookup alone proposed. Tokens have to be plain vLLM's. Counts depend on nothing
but the texts: no quiet machine is needed. What stands behind +- is the standard error from prompt
to prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.arms import PLAIN, Arm, ArmOptions
from benchmarks.case import ROOT, Case, Row
from benchmarks.tau import Counts, answers, differing, figures
from vllm_medusa.job import Progress
from vllm_medusa.offline.engine import medusa_config
from vllm_medusa.options import Dtype, Positive, option

HEADS = "heads"  # the arm that others are compared with


class LookupOptions(ArmOptions):
    """What is measured."""

    texts: tuple[Path, ...] = option(
        "files of prompts",
        default=(ROOT / "tests" / "assets" / "prompts.jsonl",),
        shown="tests/assets/prompts.jsonl",
    )
    nodes: Positive = option("draft nodes of a request", default=15)
    prompts: Positive = option("of each file", default=16)
    max_tokens: Positive = option("of each answer", default=96)
    batch: tuple[Positive, ...] = option("requests at a time; changes little", default=(8,))
    dtype: Dtype = option(default="float32")


def arms(options: LookupOptions) -> list[Arm]:
    """Heads alone, lookup alone, both."""
    heads = medusa_config(str(options.heads.absolute()), budget=str(options.nodes))
    kinds: dict[str, dict[str, Any]] = {
        HEADS: heads,
        "lookup": {"method": "medusa", "budget": options.nodes, "lookup": True},
        "both": heads | {"lookup": True},
    }
    return [Arm(name, "ours", options.nodes, config) for name, config in kinds.items()]


def run(options: LookupOptions, progress: Progress) -> Iterator[Row]:
    """A row for each arm, temperature and file of prompts."""
    yield from rows(arms(options), options, progress)


def rows(chosen: Sequence[Arm], options: LookupOptions, progress: Progress) -> Iterator[Row]:
    """Decode all texts with each arm."""
    texts = {path.stem: replace(options, prompt_file=path).read_prompts() for path in options.texts}
    wanted = answers(PLAIN, options, texts)
    alone: dict[tuple[float, str], Counts] = {}  # of heads
    for arm in chosen:
        progress.note(arm.name)
        copied: dict[tuple[float, str], float] = {}
        found = answers(arm, options, texts, copied if arm.copies else None)
        for (temperature, name), results in found.items():
            what: dict[str, Any] = {
                "name": f"{arm.name}, T {temperature:g}, {name}",
                "arm": arm.name,
            }
            what |= {"temperature": temperature, "texts": name}
            counts = [(r.acceptance.accepted, r.acceptance.steps) for r in results]
            if arm.name == HEADS:
                alone[temperature, name] = counts
            numbers = figures(counts, alone.get((temperature, name)) if arm.copies else None)
            if arm.copies:
                accepted = sum(each for each, _ in counts)
                numbers["share"] = 100 * copied[temperature, name] / max(accepted, 1)
            wrong = differing(results, wanted[temperature, name])
            reason = f"{wrong} of {len(results)} answers differ from plain vLLM's" if wrong else ""
            yield Row(what, numbers, right=not wrong, failed=reason)


def picture(found: list[dict[str, Any]], path: Path) -> None:
    """Tokens per step by kind of text, a panel for each temperature and a bar for each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in found if "tau" in row]
    kinds, temperatures, names = (
        list(dict.fromkeys(row[key] for row in shown)) for key in ("texts", "temperature", "arm")
    )
    figure, panels = plt.subplots(
        1, len(temperatures), figsize=(6 * len(temperatures), 1 + 0.6 * len(kinds)), squeeze=False,
        sharey=True,
    )  # fmt: skip
    size = 0.8 / len(names)
    for temperature, panel in zip(temperatures, panels[0], strict=True):
        for place, name in enumerate(names):
            own = [r for r in shown if (r["temperature"], r["arm"]) == (temperature, name)]
            panel.barh(
                [kinds.index(row["texts"]) + (place - (len(names) - 1) / 2) * size for row in own],
                [row["tau"] for row in own],
                size,
                xerr=[row["tau_error"] for row in own],
                label=name,
            )
        panel.axvline(1, color="black", lw=0.8)
        panel.set(xlabel="tokens per step", title=f"T {temperature:g}")
        panel.set_yticks(range(len(kinds)), kinds)
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


CASE = Case(
    LookupOptions,
    run,
    {
        "texts": ("texts", ""),
        "temperature": ("T", "g"),
        "arm": ("drafts of", ""),
        "tau": ("tau", ".2f"),
        "tau_error": ("+-", ".2f"),
        "gain": ("% above heads", "+.0f"),
        "gain_error": ("+-", ".0f"),
        "share": ("% of accepted copied", ".0f"),
        "steps": ("steps", "d"),
        "requests": ("answers equal to plain's", "d"),
    },
    quick={"prompts": 4, "max_tokens": 32},
    picture=picture,
)
