r"""Tokens per step: trees of each request's and step's own beside static ones of equal size.

    vllm-medusa distill TARGET -i OTHER_PROMPTS -o RECORDS --samples 2 \
        --temperature 0,0.8
    python -m benchmarks tau TARGET HEADS RECORDS --texts tests/assets/prompts.jsonl MORE.jsonl

For each temperature heads are calibrated on the records of that temperature, and the static tree
of a size is the one that `vllm-medusa tree` finds for it; its prefixes are the trees of smaller
sizes. Dynamic trees go by the heads' probabilities as they are (raw) and after the temperature that
calibration found for each head. No prompt measured may be one of the records'. Tokens have to be
plain vLLM's. Counts depend on nothing but the texts: no quiet machine is needed. What stands behind
+- is the standard error from prompt to prompt; of a gain, both trees lose the same prompts.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import PLAIN, Arm, ArmOptions, dynamic_arm, engine, sampling, tree_arm
from benchmarks.case import ROOT, Case, Row
from benchmarks.report import table
from vllm_medusa.calibration.calibrate import calibrate
from vllm_medusa.calibration.observations import Observations
from vllm_medusa.calibration.options import CalibrateOptions
from vllm_medusa.calibration.search import walked_tree
from vllm_medusa.job import Progress
from vllm_medusa.offline.batch import Result
from vllm_medusa.offline.defaults import prompt_ids
from vllm_medusa.offline.prompts import Prompt, load_prompts
from vllm_medusa.offline.records import key_of, load_records
from vllm_medusa.options import Dtype, Positive, option
from vllm_medusa.training.inputs import find_tokenizer

SEED = 0
COPIED = "medusa_lookup_accepted_tokens"
STATIC, RAW, CALIBRATED = "static", "dynamic, raw", "dynamic"
Counts = list[tuple[int, int]]  # accepted tokens and steps of each prompt


class TauOptions(ArmOptions):
    """What is measured."""

    records: Path = option("of `vllm-medusa distill`, to calibrate on", positional=True)
    texts: tuple[Path, ...] = option(
        "files of prompts",
        default=(ROOT / "tests" / "assets" / "prompts.jsonl",),
        shown="tests/assets/prompts.jsonl",
    )
    sizes: tuple[Positive, ...] = option("draft nodes", default=(2, 4, 7, 15, 31))
    prompts: Positive = option("of each file, at most", default=256)
    max_tokens: Positive = option("of each answer", default=96)
    batch: tuple[Positive, ...] = option("requests at a time; changes nothing", default=(16,))
    dtype: Dtype = option(default="float32")


def run(options: TauOptions, progress: Progress) -> Iterator[Row]:
    """A row for each size, kind of tree, temperature and file of prompts."""
    texts = {path.stem: _prompts(path, options) for path in options.texts}
    _refuse_overlap(options)
    with tempfile.TemporaryDirectory() as folder:
        progress.note("calibrating")
        kinds = _kinds(options, Path(folder))
        wanted = answers(PLAIN, options, texts)
        static: dict[tuple[Any, ...], Counts] = {}
        for size in options.sizes:
            for kind, own in kinds:
                what = {"arm": kind, "nodes": size}
                arm = tree_arm(own, size) if kind == STATIC else dynamic_arm(own, size)
                try:
                    found = answers(arm, own, texts) if arm else {}
                except Exception as error:
                    yield Row(what, failed=f"{type(error).__name__}: {error}")
                    continue
                for (temperature, name), results in found.items():
                    at = (size, temperature, name)
                    counts = [(r.acceptance.accepted, r.acceptance.steps) for r in results]
                    if kind == STATIC:
                        static[at] = counts
                    row: dict[str, Any] = {"name": f"{kind} {size}, T {temperature:g}, {name}"}
                    row |= what | {"temperature": temperature, "texts": name}
                    numbers = figures(counts, static.get(at) if kind != STATIC else None)
                    wrong = differing(results, wanted[temperature, name])
                    reason = f"{wrong} of {len(results)} answers differ from plain vLLM's"
                    yield Row(row, numbers, right=not wrong, failed=reason if wrong else "")


def _prompts(path: Path, options: TauOptions) -> list[Prompt]:
    """The prompts of a file, none of them twice."""
    found = replace(options, prompt_file=path).read_prompts()
    return list({prompt.line: prompt for prompt in reversed(found)}.values())[::-1]


def _refuse_overlap(options: TauOptions) -> None:
    tokenizer = find_tokenizer(str(options.target))
    records, _ = load_records(options.records, tokenizer)
    known = {record.prompt_key for record in records}
    for path in options.texts:
        found = (prompt_ids(prompt, tokenizer) for prompt in load_prompts(path))
        if any(key_of(ids, len(ids)) in known for ids in found):
            raise ValueError(f"{options.records} has texts of prompts of {path}: take others.")


def _kinds(options: TauOptions, folder: Path) -> list[tuple[str, TauOptions]]:
    """Each kind with heads and tree, and the temperatures at which it is measured with them."""
    raw = folder / "raw"
    shutil.copytree(options.heads, raw)
    config = json.loads((raw / "config.json").read_text(encoding="utf-8"))
    config.get("medusa", {}).pop("calibration", None)
    (raw / "config.json").write_text(json.dumps(config), encoding="utf-8")
    static, calibrated = [], []
    for temperature in options.temperatures:
        heads, tree = folder / f"{temperature:g}", folder / f"{temperature:g}.json"
        shutil.copytree(raw, heads)
        calibrate(
            CalibrateOptions(
                model=str(options.target),
                heads=heads,
                data=options.records,
                temperature=temperature,
            )
        )
        seen = Observations.load(heads)
        paths = walked_tree(seen.texts(), max(options.sizes), seen.num_ranks)
        tree.write_text(json.dumps(paths), encoding="utf-8")
        own = replace(options, heads=heads, tree=tree, temperatures=(temperature,))
        static.append((STATIC, own))
        calibrated.append((CALIBRATED, own))
    return [*static, (RAW, replace(options, heads=raw)), *calibrated]


def answers(
    arm: Arm,
    options: ArmOptions,
    texts: dict[str, list[Prompt]],
    copied: dict[tuple[float, str], float] | None = None,
) -> dict[tuple[float, str], list[Result]]:
    """By temperature and file, in the order of its prompts.

    ``copied`` takes in how many tokens lookup alone brought.
    """
    found = {}
    with engine(arm, options, max(options.temperatures)) as process:
        for temperature in options.temperatures:
            process.sampling = sampling(options, temperature)
            for name, prompts in texts.items():
                seed = SEED if temperature > 0 else None
                before = process.count(COPIED) if copied is not None else 0.0
                results, _ = process.run(prompts, options.batch[0], seed)
                if copied is not None:
                    copied[temperature, name] = process.count(COPIED) - before
                if refused := next((result.error for result in results if result.error), None):
                    raise ValueError(refused)
                found[temperature, name] = sorted(results, key=lambda r: r.prompt.index)
    return found


def differing(results: Sequence[Result], wanted: Sequence[Result]) -> int:
    """How many of the answers are not as wanted."""
    return sum(
        a.answers[0].token_ids != b.answers[0].token_ids
        for a, b in zip(results, wanted, strict=True)
    )


def figures(counts: Counts, static: Counts | None = None) -> dict[str, Any]:
    """What counts say; beside a static tree's on the same prompts, the gain in percent too."""
    steps = sum(steps for _, steps in counts)
    tau, error = with_error(counts)
    row = {"tau": tau, "tau_error": error, "steps": steps, "requests": len(counts)}
    if static is not None:
        gain, error = with_error(counts, static)
        row |= {"gain": 100 * (gain - 1), "gain_error": 100 * error}
    return row


def with_error(counts: Counts, base: Counts | None = None) -> tuple[float, float]:
    """Tau, or its ratio to that of ``base`` on the same prompts; and its jackknife error."""

    def taus(each: Counts) -> Any:  # over all, then [n] without each prompt
        accepted, steps = np.array(each, dtype=float).T
        totals = accepted.sum() - np.array([0.0, *accepted]), steps.sum() - np.array([0.0, *steps])
        return 1 + totals[0] / totals[1]

    found = taus(counts) if base is None else taus(counts) / taus(base)
    without, count = found[1:], len(counts)
    spread = ((without - without.mean()) ** 2).sum()
    return float(found[0]), math.sqrt((count - 1) / count * spread) if count > 1 else math.nan


def together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each temperature and size: tau over all texts, and what dynamic trees gain."""
    found: dict[tuple[float, int], dict[str, Any]] = {}
    for temperature, size in dict.fromkeys(
        (row["temperature"], row["nodes"]) for row in rows if "tau" in row
    ):
        row = found[temperature, size] = {"temperature": temperature, "nodes": size}
        for kind in (STATIC, RAW, CALIBRATED):
            at = (temperature, size, kind)
            own = [r for r in rows if "tau" in r and (r["temperature"], r["nodes"], r["arm"]) == at]
            if own:
                steps = sum(r["steps"] for r in own)
                row[kind] = sum(r["tau"] * r["steps"] for r in own) / steps
                if STATIC in row and kind != STATIC:
                    row[f"{kind} gain"] = 100 * (row[kind] / row[STATIC] - 1)
    return [found[key] for key in sorted(found)]


def text(rows: list[dict[str, Any]]) -> str:
    """All texts together, as a table."""
    columns = {"temperature": ("T", "g"), "nodes": ("draft nodes", "d")}
    for kind in (STATIC, RAW, CALIBRATED):
        columns |= {kind: (kind, ".3f"), f"{kind} gain": ("% above static", "+.1f")}
    return "\n".join(["All texts together:", "", *table(together(rows), columns)])


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Tau above and the gain over static trees below, a column for each text and temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if "tau" in row]
    columns = list(dict.fromkeys((row["temperature"], row["texts"]) for row in shown))
    figure, panels = plt.subplots(
        2, len(columns), figsize=(4 * len(columns), 7), squeeze=False, sharex=True, sharey="row"
    )
    colors = {STATIC: "tab:blue", RAW: "tab:orange", CALIBRATED: "tab:red"}
    for column, (top, below) in zip(columns, panels.T, strict=True):
        for kind, color in colors.items():
            here = [r for r in shown if (r["temperature"], r["texts"], r["arm"]) == (*column, kind)]
            for panel, key in ((top, "tau"), (below, "gain")):
                has = [row for row in here if key in row]
                panel.errorbar(
                    [row["nodes"] for row in has],
                    [row[key] for row in has],
                    [row[f"{key}_error"] for row in has],
                    label=kind if has else None,
                    color=color,
                    marker="o",
                    ms=3,
                    capsize=2,
                )
        below.axhline(0, color=colors[STATIC])
        sizes = sorted({row["nodes"] for row in shown})
        below.set_xscale("log", base=2)
        below.set_xticks(sizes, [str(size) for size in sizes])
        below.set(xlabel="draft nodes")
        top.set(title=f"{column[1]}, T {column[0]:g}")
        for panel in (top, below):
            panel.grid(alpha=0.3)
    panels[0][0].set(ylabel="tokens per step")
    panels[1][0].set(ylabel="% above the static tree")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


CASE = Case(
    TauOptions,
    run,
    {
        "texts": ("texts", ""),
        "temperature": ("T", "g"),
        "nodes": ("draft nodes", "d"),
        "arm": ("tree", ""),
        "tau": ("tau", ".3f"),
        "tau_error": ("+-", ".3f"),
        "gain": ("% above static", "+.1f"),
        "gain_error": ("+-", ".1f"),
        "steps": ("steps", "d"),
        "requests": ("answers equal to plain's", "d"),
    },
    quick={"sizes": (4,), "prompts": 16, "max_tokens": 48},
    picture=picture,
    text=text,
)
