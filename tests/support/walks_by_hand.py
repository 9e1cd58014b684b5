"""Decoding of a calibrated text, step by step."""

from collections.abc import Sequence
from typing import Any


def steps_of(text: Any, tree: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """(position, path accepted there) of each step; ``text`` is ranks [n, K]."""
    nodes, at, steps = set(tree), 0, []
    while at < len(text):
        path: tuple[int, ...] = ()
        while len(path) < len(text[at]) and (*path, int(text[at][len(path)])) in nodes:
            path = (*path, int(text[at][len(path)]))
        steps.append((at, path))
        at += 1 + len(path)
    return steps
