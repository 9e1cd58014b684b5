"""The terminal replay: both engines side by side, each token at the time it was generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from demo.recording import Recording, Run, Take, joined

DRAFTED_STYLE = "bold green"
FRAMES_PER_SECOND = 30
_WIDEST = 72  # max columns of a panel
_AROUND = 8  # screen lines other than answer text
_PAUSE = 1.5  # seconds after each prompt


def replay(
    console: Console,
    recording: Recording,
    runs: Sequence[Run],
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the runs one after the other, in real time."""
    for run in runs:
        with Live(console=console, auto_refresh=False) as live:
            start = now()
            while True:
                clock = now() - start
                live.update(frame(console, run, clock, recording.drafter), refresh=True)
                if clock >= run.seconds:
                    break
                sleep(1 / FRAMES_PER_SECOND)
        console.print()
        sleep(_PAUSE)


def frame(console: Console, run: Run, clock: float, drafter: str) -> RenderableType:
    """Both panels ``clock`` seconds after the requests."""
    width = min(_WIDEST, console.width // 2)
    takes = {"plain vLLM": run.plain, f"with drafts ({drafter})": run.drafted}
    room = max(3, console.height - _AROUND)
    lines = max(len(_wrapped(console, take, take.seconds, width)) for take in takes.values())
    panels = [
        Panel(
            Text("\n").join(_wrapped(console, take, clock, width)[-room:]),
            title=title,
            title_align="left",
            subtitle=take.status(clock),
            subtitle_align="left",
            width=width,
            height=min(lines, room) + 2,
            border_style="green" if clock >= take.seconds else "",
        )
        for title, take in takes.items()
    ]
    heading = Text(f"T {run.temperature:g}  ", style="bold")
    heading.append(" ".join(run.prompt.split()), style="dim")
    heading.truncate(2 * width, overflow="ellipsis")
    return Group(heading, Columns(panels, padding=0), ending(run, clock))


def ending(run: Run, clock: float) -> Text:
    """The last line: the legend and, once both engines are done, the outcome."""
    text = Text("drafted and accepted", style=DRAFTED_STYLE)
    if clock >= run.seconds:
        text.append(f"   {run.outcome}", style="bold white")
    return text


def _wrapped(console: Console, take: Take, clock: float, width: int) -> list[Text]:
    text = Text()
    for span in joined(take.done(clock)):
        text.append(span.text, style=DRAFTED_STYLE if span.drafted else "")
    return list(text.wrap(console, width - 4))
