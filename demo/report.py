"""The demo's printed output: texts with marked drafted tokens, the table, and the conclusion."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.recording import Recording, Run, Take, joined

_MARKS = ("«", "»")  # around tokens that were drafted and accepted
_SHOWN_DIFFERENCES = 5
_MAX_OF_TAU = 1.1  # ratios above this multiple of tau are not due to drafts


def texts(console: Console, runs: Sequence[Run]) -> None:
    """Print final texts, for outputs where a replay is impossible."""
    console.print(f"{_MARKS[0]}drafted and accepted{_MARKS[1]}, the rest by the model itself\n")
    for run in runs:
        acceptance = run.drafted.acceptance
        title = f"{run.name}, T {run.temperature:g}"
        steps = f"{len(run.drafted.token_ids)} tokens in {acceptance.steps + 1} steps"
        body = Text(f"{run.prompt}\n\n", style="dim").append_text(marked(run.drafted))
        console.print(Panel(body, title=Text(title), subtitle=steps, width=min(console.width, 100)))


def marked(take: Take) -> Text:
    """An answer with marks around its drafted tokens, excluding leading and trailing spaces."""
    text = Text()
    for span in joined(take.steps):
        core = span.text.strip()
        if span.drafted and core:
            before, _, after = span.text.partition(core)
            text.append(f"{before}{_MARKS[0]}{core}{_MARKS[1]}{after}")
        else:
            text.append(span.text)
    return text


def figures(console: Console, recording: Recording) -> None:
    """Print the table."""
    table = Table(title="tokens per second, prefill included", title_justify="left")
    for name in ("", "plain", "drafted", "ratio", "tau", "steps", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in recording.figures():
        table.add_row(
            f"T {row.temperature:g}",
            f"{row.plain_speed:.1f}",
            f"{row.drafted_speed:.1f}",
            f"{row.ratio:.2f}x",
            "-" if row.tau is None else f"{row.tau:.2f}",
            f"{row.plain_steps} -> {row.drafted_steps}",
            f"{row.identical}/{row.requests}",
            style="" if row.identical == row.requests else "bold red",
        )
    console.print(table)
    console.print(
        f"{recording.target} in float32, drafted by {recording.drafter}; one request at "
        f"a time, each engine alone on {recording.machine}. tau: tokens per verification step.",
        style="dim",
    )
    if any(not 1 <= row.ratio <= _MAX_OF_TAU * (row.tau or 1) for row in recording.figures()):
        console.print(
            "Some ratios are below 1x or far above tau, perhaps because of other load. Run it on "
            "an idle machine.",
            style="yellow",
        )


def verdict(console: Console, recording: Recording) -> bool:
    """Print whether all tokens are identical, and where they differ; returns whether they are."""
    different = [run for run in recording.runs if not run.identical]
    console.print()
    if not different:
        tokens = sum(len(run.plain.token_ids) for run in recording.runs)
        console.print(
            f"[bold green]IDENTICAL[/]: all {tokens} tokens of {len(recording.runs)} answers are "
            "plain vLLM's."
        )
        return True
    console.print(
        f"[bold red]DIFFERENT[/]: {len(different)} of {len(recording.runs)} answers differ from "
        "plain vLLM's."
    )
    for run in different[:_SHOWN_DIFFERENCES]:
        name = f"{run.name}, T {run.temperature:g}"
        console.print(Text(f"  {name}: from token {run.first_difference} on"))
    return False
