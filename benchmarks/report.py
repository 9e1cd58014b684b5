"""Rows as a Markdown table and as a plot, and the machine of the measurement."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT, Case, Plot
from vllm_medusa.offline.machine import describe_machine, format_machine
from vllm_medusa.plugin import installed_vllm

_SHOWN_REASON = 200  # characters; the JSON file has the full text
_MAX_LEGEND = 6  # lines whose legend is drawn inside the panels


def describe(commit: str | None = None) -> dict[str, Any]:
    """Machine, versions and commit; ``commit`` names a copy without git."""
    if commit is None:
        commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
        if _git("status", "--porcelain", "vllm_medusa", "benchmarks"):
            commit += " with local changes"
    versions = {"torch": metadata.version("torch"), "vllm": installed_vllm()[1] or ""}
    return describe_machine() | {"commit": commit, "python": platform.python_version()} | versions


def _git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""


def markdown(document: Mapping[str, Any], cases: Mapping[str, Case]) -> str:
    """All tables, below the command and the machine."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "vllm") if machine[name])
    lines = [f"    {document['command']}", ""]
    lines += [f"{format_machine(machine)}; {versions}; commit {machine['commit']}."]
    for name, found in document["cases"].items():
        lines += ["", f"## {name}", "", *table(found["rows"], cases[name].columns)]
        if text := cases[name].text(found["rows"]):
            lines += ["", text]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """The lines of a table, without columns that are empty in all rows."""
    shown = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    if any("of_commit" in row for row in rows):
        shown = {"of_commit": ("commit", ""), "turn": ("turn", "")} | shown
    remarks = any("failed" in row or "note" in row for row in rows)
    titles = [title for title, _ in shown.values()] + ["remark"] * remarks
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = [_cell(row.get(key), format_) for key, (_, format_) in shown.items()]
        if remarks:
            failed = f"FAILED: {_short(row['failed'])}" if "failed" in row else ""
            cells.append(failed or row.get("note", ""))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: Any, format_: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(_cell(each, format_) for each in value)
    return format(value, "" if isinstance(value, str) else format_)


def _short(reason: str) -> str:
    """The first non-blank line, without characters that would end a table cell."""
    line = next(line for line in reason.splitlines() if line.strip())
    return line.replace("|", "/")[:_SHOWN_REASON]


def draw(rows: Sequence[Mapping[str, Any]], plot: Plot, path: Path) -> None:
    """Plot the rows that have all keys of ``plot``: a row of panels for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if all(row.get(key) is not None for key in (plot.x, *plot.ys))]
    temperatures = sorted({row.get("temperature", 0.0) for row in shown})
    bars = len({row[plot.x] for row in shown}) < 2
    panel_height = 1.5 + 0.25 * len(shown) / max(len(temperatures), 1) if bars else 4.2
    size = (6 * len(plot.ys), panel_height * len(temperatures))
    figure, grid = plt.subplots(len(temperatures), len(plot.ys), figsize=size, squeeze=False)
    for temperature, panels in zip(temperatures, grid, strict=True):
        here = [row for row in shown if row.get("temperature", 0.0) == temperature]
        for y, panel in zip(plot.ys, panels, strict=True):
            if bars:
                panel.barh([str(row["name"]) for row in here], [row[y] for row in here])
                panel.invert_yaxis()
                panel.set(xlabel=y.replace("_", " "))
            else:
                _lines(here, y, plot, panel)
            panel.grid(alpha=0.3)
        if not bars and len(panels[0].get_legend_handles_labels()[1]) <= _MAX_LEGEND:
            for panel in panels:
                panel.legend(fontsize=7)
        elif not bars:
            panels[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(rows: Sequence[Mapping[str, Any]], y: str, plot: Plot, panel: Any) -> None:
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row[plot.x]):
        name = ", ".join(str(row[key]) for key in (*plot.series, "texts") if key in row)
        series.setdefault(name, []).append(row)
    for number, (name, own) in enumerate(series.items()):
        values = [row[y] for row in own]
        spread: Any = [row.get(f"{y}_error", 0.0) for row in own]
        if all(f"{y}_quartiles" in row for row in own):
            pairs = [row[f"{y}_quartiles"] for row in own]
            below = [value - low for value, (low, _) in zip(values, pairs, strict=True)]
            above = [high - value for value, (_, high) in zip(values, pairs, strict=True)]
            spread = [below, above]
        style = ("-", "--", ":")[number // 10 % 3]  # there are ten colors
        x = [row[plot.x] for row in own]
        panel.errorbar(x, values, spread, label=name, marker=".", linestyle=style)
    if plot.log:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({row[plot.x] for row in rows}))
        panel.xaxis.set_major_formatter("{x:g}")
    temperature = f"T {rows[0]['temperature']:g}" if "temperature" in rows[0] else ""
    panel.set(xlabel=plot.x.replace("_", " "), ylabel=y.replace("_", " "), title=temperature)
