"""A recording as an animated SVG: both engines side by side, in real time, looping.

It is animated by CSS, so that it plays as an image in a README, where scripts do not run. Without
animation, it shows the end of the first scene.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len, set_cell_size

from demo.recording import Recording, Run, Take

COLUMNS = 56  # of a panel
_CHAR, _LINE = 7.8, 18  # pixels
_MARGIN, _INSIDE = 16, 12
_PANEL = round(COLUMNS * _CHAR + 2 * _INSIDE)
_WIDTH = 3 * _MARGIN + 2 * _PANEL
_TOP = 84  # of the panels
_LEAD, _HOLD = 0.8, 3.0  # seconds before and after generation in each scene
_TICK = 0.1  # seconds between clock updates
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STYLE = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#c9d1d9}
.d{fill:#3fb950}.dim{fill:#8b949e}.b{font-weight:bold;fill:#f0f6fc}
.box{fill:#161b22;stroke:#30363d}
.k{animation:%ss step-end infinite}.c{animation:%ss linear infinite}
@media(prefers-reduced-motion:reduce){.k,.c{animation:none}}
"""


@dataclass(frozen=True)
class Word:
    """Characters of one line that appear together; line and column count from 0."""

    line: int
    column: int
    text: str
    drafted: bool


def wrap(text: str, columns: int) -> list[tuple[int, int]]:
    """Start and end of each line of a text, broken at spaces if possible."""
    lines, start = [], 0
    for paragraph in text.split("\n"):
        end = start + len(paragraph)
        while cell_len(text[start:end]) > columns:
            full = next(i for i in range(end, start, -1) if cell_len(text[start:i]) <= columns)
            space = text.rfind(" ", start, full + 1)
            stop = space if space > start else full
            lines.append((start, stop))
            start = stop + (text[stop] == " ")
        lines.append((start, end))
        start = end + 1
    return lines


def layout(take: Take, columns: int) -> list[list[Word]]:
    """The words of each step, at their final places."""
    spans = [[(_clean(span.text), span.drafted) for span in step.spans] for step in take.steps]
    text = "".join(part for step in spans for part, _ in step)
    lines = wrap(text, columns)
    steps, begin = [], 0
    for step in spans:
        words: list[Word] = []
        for part, drafted in step:
            words += _words(text, lines, begin, begin + len(part), drafted)
            begin += len(part)
        steps.append(words)
    return steps


def _words(
    text: str, lines: list[tuple[int, int]], begin: int, end: int, drafted: bool
) -> Iterator[Word]:
    for number, (first, last) in enumerate(lines):
        piece = text[max(first, begin) : min(last, end)] if begin < last and first < end else ""
        if piece.strip():
            before = text[first : max(first, begin)] + piece[: len(piece) - len(piece.lstrip())]
            yield Word(number, cell_len(before), piece.strip(), drafted)


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text.replace("\t", "    "))


def draw(recording: Recording, runs: Sequence[Run]) -> str:
    """The SVG; ``runs`` are its scenes. Raises ValueError: there are none."""
    if not runs:
        raise ValueError("there is nothing to draw; set --replays to a number above 0.")
    lengths = [_LEAD + run.seconds + _HOLD for run in runs]
    cycle = sum(lengths)
    lines = 1 + max(
        word.line
        for run in runs
        for take in (run.plain, run.drafted)
        for step in layout(take, COLUMNS)
        for word in step
    )
    bottom = _TOP + 2 * _INSIDE + lines * _LINE
    height = bottom + 68
    drawing = _Drawing(cycle, bottom)
    for number, run in enumerate(runs):
        drawing.scene(recording, run, start=sum(lengths[:number]), length=lengths[number])
    style = _STYLE % (f"{cycle:.2f}", f"{cycle:.2f}") + "".join(drawing.rules)
    table = ", ".join(
        f"T {row.temperature:g}: {row.plain_speed:.0f} and {row.drafted_speed:.0f}"
        for row in recording.figures()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" xml:space="preserve">\n'
        f"<title>Plain vLLM and vLLM with drafts, side by side in real time</title>\n"
        f"<desc>Tokens per second, {escape(table)}</desc>\n<style>{style}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#0d1117"/>\n'
        + "".join(f'<circle cx="{20 + 18 * i}" cy="18" r="5" fill="#30363d"/>' for i in range(3))
        + "".join(drawing.body)
        + "</svg>\n"
    )


class _Drawing:
    """Elements and their animation rules, in order."""

    def __init__(self, cycle: float, bottom: float):
        self.cycle, self.bottom = cycle, bottom
        self.body: list[str] = []
        self.rules: list[str] = []

    def scene(self, recording: Recording, run: Run, start: float, length: float) -> None:
        """Draw a run that begins ``start`` seconds into the picture."""
        hidden = ' opacity="0"' if start else ""
        times = {0.0: 0, start: 1} if start else {0.0: 1}
        if start + length < self.cycle - 1e-6:
            times[start + length] = 0
        self.body.append(f'\n<g class="k"{self._appear(times)}{hidden}>')
        prompt = set_cell_size(" ".join(_clean(run.prompt).split()), 2 * COLUMNS - 6).rstrip()
        self._text(_MARGIN, 48, prompt, "dim")
        began = start + _LEAD
        self._panel(_MARGIN, "plain vLLM", run.plain, began)
        self._panel(2 * _MARGIN + _PANEL, f"with drafts ({recording.drafter})", run.drafted, began)
        y = self.bottom + 50
        self._text(_MARGIN, y, f"T {run.temperature:g}", "b")
        self._text(_MARGIN + 8 * _CHAR, y, "drafted and accepted", "d")
        self.body.append(f'<g class="k"{self._appear({0.0: 0, began + run.seconds: 1})}>')
        self._text(2 * _MARGIN + _PANEL, y, run.outcome, "b")
        self.body.append("</g></g>")

    def _panel(self, x: float, title: str, take: Take, began: float) -> None:
        self._text(x, _TOP - 10, title, "b")
        height = self.bottom - _TOP
        self.body.append(
            f'<rect class="box" x="{x}" y="{_TOP}" width="{_PANEL}" height="{height}" rx="6"/>\n'
        )
        for step, words in zip(take.steps, layout(take, COLUMNS), strict=True):
            if not words:
                continue
            self.body.append(f'<g class="k"{self._appear({0.0: 0, began + step.at: 1})}>')
            for word in words:
                left = x + _INSIDE + word.column * _CHAR
                y = _TOP + _INSIDE + (word.line + 0.75) * _LINE
                self._text(left, y, word.text, "d" if word.drafted else "")
            self.body.append("</g>\n")
        self._clock(x, take, began)

    def _clock(self, x: float, take: Take, began: float) -> None:
        """A strip with one line per tick, of which one line is visible at a time."""
        ticks = math.ceil(take.seconds / _TICK)
        far = ticks * _LINE
        name = f"c{len(self.rules)}"
        begin, end = self._percent(began), self._percent(began + take.seconds)
        self.rules.append(
            f"@keyframes {name}{{0%,{begin}{{transform:translateY(0);"
            f"animation-timing-function:steps({ticks})}}"
            f"{end},100%{{transform:translateY(-{far}px)}}}}\n"
        )
        self.body.append(
            f'<svg x="{x}" y="{self.bottom + 6}" width="{_PANEL}" height="{_LINE}">'
            f'<g class="c" style="animation-name:{name}" transform="translate(0,-{far})">'
        )
        for tick in range(ticks + 1):
            self._text(0, tick * _LINE + 14, take.status(take.seconds * tick / ticks), "dim")
        self.body.append("</g></svg>\n")

    def _appear(self, opacities: dict[float, int]) -> str:
        """The attribute that animates an element: its opacity from each given time on."""
        steps = "".join(f"{self._percent(t)}{{opacity:{o}}}" for t, o in opacities.items())
        name = f"k{len(self.rules)}"
        self.rules.append(f"@keyframes {name}{{{steps}}}\n")
        return f' style="animation-name:{name}"'

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        kind = f' class="{kind}"' if kind else ""
        length = f' textLength="{cell_len(text) * _CHAR:.1f}"'
        self.body.append(f'<text{kind} x="{x:.1f}" y="{y:.1f}"{length}>{escape(text)}</text>')

    def _percent(self, seconds: float) -> str:
        return f"{100 * seconds / self.cycle:.3f}".rstrip("0").rstrip(".") + "%"
