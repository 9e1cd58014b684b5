"""The animated picture: well-formed, self-contained, all answers in it, lines where they break."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.recordings import RECORDING, RUN, take

from demo.svg import COLUMNS, draw, layout, wrap

NS = "{http://www.w3.org/2000/svg}"


def test_it_is_self_contained_and_has_no_scripts():
    text = draw(RECORDING, [replace(RUN, prompt='<script>"&" \x1b[0m')])
    whole = draw(RECORDING, RECORDING.shown(3))
    assert all(run.prompt in whole and run.outcome in whole for run in RECORDING.shown(3))
    names = {element.tag.removeprefix(NS) for element in ElementTree.fromstring(text).iter()}
    assert names <= {"svg", "title", "desc", "style", "rect", "circle", "g", "text"}
    assert not re.search(r"href|url\(|@import|@font-face", text)


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
