"""The animated picture is well-formed, self-contained, and correct at any time."""

import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.recordings import PLAIN, RECORDING, RUN, take

from demo.recording import Step, Take, joined
from demo.svg import _HOLD, _LEAD, _MARGIN, _PANEL, _TOP, COLUMNS, draw, layout, wrap

NS = "{http://www.w3.org/2000/svg}"
RUNS = RECORDING.shown(3)


class Picture:
    """An SVG and its animation, evaluated like a browser: the last keyframe reached."""

    def __init__(self, text: str):
        self.root = ElementTree.fromstring(text)
        style = self.root.find(f"{NS}style").text
        self.cycle = float(re.search(r"\.k\{animation:([\d.]+)s step-end infinite\}", style)[1])
        self.rules = {
            name: [(float(p), int(o)) for p, o in re.findall(r"([\d.]+)%\{opacity:(\d)\}", frames)]
            for name, frames in re.findall(r"@keyframes (k\d+)\{(.*)\}", style)
        }

    def texts(self, at: float | None) -> list[tuple[float, float, str]]:
        """(x, y, text) of visible text; None: without animation."""
        return [
            (float(e.get("x")), float(e.get("y")), e.text) for e in self._visible(self.root, at)
        ]

    def panel(self, left: bool, at: float | None) -> str:
        """The text of a panel, without spaces."""
        boxes = [e for e in self.root.iter(f"{NS}rect") if e.get("class") == "box"]
        low = _TOP + float(boxes[0].get("height"))
        middle = 1.5 * _MARGIN + _PANEL
        inside = [
            (y, x, text) for x, y, text in self.texts(at) if _TOP < y < low and (x < middle) == left
        ]
        return "".join(text for *_, text in sorted(inside))

    def _visible(
        self, element: ElementTree.Element, at: float | None
    ) -> Iterator[ElementTree.Element]:
        found = re.search(r"animation-name:(k\d+)", element.get("style", ""))
        opacity = float(element.get("opacity", 1))
        if found and at is not None:
            reached = [o for p, o in self.rules[found[1]] if p <= 100 * at / self.cycle + 1e-6]
            opacity = reached[-1]
        if opacity == 0 or (element.tag == f"{NS}svg" and element is not self.root):  # a clock
            return
        if element.tag == f"{NS}text":
            yield element
        for child in element:
            yield from self._visible(child, at)


def text_at(answer: Take, clock: float) -> str:
    return re.sub(r"\s", "", "".join(span.text for span in joined(answer.done(clock))))


@pytest.mark.parametrize("scene", [0, 1, 2])
@pytest.mark.parametrize("clock", [0.0, 0.15, 0.25, 0.35, 0.61, 0.75])
def test_each_time_shows_the_delivered_text(scene, clock):
    picture = Picture(draw(RECORDING, RUNS))
    assert picture.cycle == pytest.approx(sum(_LEAD + r.seconds + _HOLD for r in RUNS), abs=0.01)
    at = sum(_LEAD + r.seconds + _HOLD for r in RUNS[:scene]) + _LEAD + clock
    run = RUNS[scene]
    assert picture.panel(True, at) == text_at(run.plain, clock)
    assert picture.panel(False, at) == text_at(run.drafted, clock)
    texts = [text for *_, text in picture.texts(at)]
    assert run.prompt in texts and f"T {run.temperature:g}" in texts
    assert not {other.prompt for other in RUNS} - {run.prompt} & set(texts)
    assert (run.outcome in texts) == (clock >= run.seconds)


def test_without_animation_it_shows_the_end_of_the_first_scene():
    picture = Picture(draw(RECORDING, RUNS))
    texts = [text for *_, text in picture.texts(None)]
    assert RUNS[0].prompt in texts and RUNS[0].outcome in texts
    assert picture.panel(True, None) == picture.panel(False, None) == "abcdefg"


def test_it_is_self_contained_and_has_no_scripts():
    text = draw(RECORDING, [replace(RUN, prompt='<script>"&" \x1b[0m')])
    names = {element.tag.removeprefix(NS) for element in ElementTree.fromstring(text).iter()}
    assert names <= {"svg", "title", "desc", "style", "rect", "circle", "g", "text"}
    assert not re.search(r"href|url\(|@import|@font-face", text)


def test_long_answers_stay_below_300_kb():
    def long(tokens: int) -> Take:
        steps = tuple(
            Step(0.03 * i, tuple(" letters" for _ in range(tokens))) for i in range(1, 161, tokens)
        )
        return replace(PLAIN, steps=steps)

    run = replace(RUN, plain=long(1), drafted=long(2))
    assert len(draw(RECORDING, [run] * 3).encode()) < 300_000


def test_an_empty_recording_is_reported():
    with pytest.raises(ValueError, match="--replays"):
        draw(RECORDING, [])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two three", ["one two", "three"]),
        ("one two  three", ["one two ", "three"]),
        ("abcdefghijk", ["abcdefgh", "ijk"]),
        ("a\n\nb", ["a", "", "b"]),
        ("日本語日本語", ["日本語日", "本語"]),
    ],
)
def test_lines_wrap_at_spaces(text, lines):
    assert [text[start:end] for start, end in wrap(text, 8)] == lines


def test_words_keep_their_place_in_the_full_text():
    answer = take([(0.1, "a"), (0.2, "b c"), (0.3, " " * COLUMNS), (0.4, "d\t\x00")])
    words = [
        [(w.line, w.column, w.text, w.drafted) for w in step] for step in layout(answer, COLUMNS)
    ]
    assert words[:2] == [[(0, 0, "a", False)], [(0, 1, "b", True), (0, 3, "c", False)]]
    assert words[2] == []
    assert [(line, text) for line, _, text, _ in words[3]] == [
        (1, "d"),
        (1, "\N{REPLACEMENT CHARACTER}"),
    ]
