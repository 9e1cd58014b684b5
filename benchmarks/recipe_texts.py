"""Texts to compare recipes on: the same prompts, continued by their source and by the target.

Prompts are cut out of Python's own standard library, which every machine with the same Python has.
Each is continued twice: as the library goes on ("plain") and as the target does ("self-distilled").
Both continuations of a prompt have the same number of tokens, so both sets have as many to train
on. The prompts held out are of other files.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.offline.records import load_records

_HELDOUT_EVERY = 8  # of the files
_SHORTEST, _LONGEST = 8, 64  # tokens of a prompt
_PER_FILE = 6
_FEWEST_BYTES, _MOST_BYTES = 256, 200_000  # of a file; larger ones are mostly generated tables
_BOS = "<s>"


@dataclass(frozen=True)
class Window:
    """A prompt and how its file goes on, as text and as token ids without the start token."""

    prompt: str
    continuation: tuple[int, ...]


def windows(tokenizer: Any, count: int, length: int, *, heldout: bool) -> list[Window]:
    """``count`` places in the standard library, with ``length`` tokens after the prompt.

    Raises:
        ValueError: the library is too small.

    """
    found = list(_windows(tokenizer, count, length, heldout))
    if len(found) < count:
        raise ValueError(f"the standard library has {len(found)} places; {count} are wanted")
    return found


def _windows(tokenizer: Any, count: int, length: int, heldout: bool) -> Iterator[Window]:
    found = 0
    for digest, text in _library():
        if (int(digest, 16) % _HELDOUT_EVERY == 0) != heldout:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        step = max(len(ids) // _PER_FILE, _LONGEST + length)
        for start in range(0, len(ids) - _LONGEST - length, step):
            size = _SHORTEST + (7 * found) % (_LONGEST - _SHORTEST)
            prompt = tokenizer.decode(ids[start : start + size])
            yield Window(prompt, tuple(ids[start + size : start + size + length]))
            found += 1
            if found == count:
                return


def _library() -> Iterator[tuple[str, str]]:
    """Digests and texts of the standard library's files, by digest, no text twice."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    found = dict[str, Path]()
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages"}.intersection(path.relative_to(root).parts):
            continue  # inside the library's folder, but not of it
        if path.is_file() and _FEWEST_BYTES <= path.stat().st_size <= _MOST_BYTES:
            found.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    for digest in sorted(found):
        try:
            yield digest, found[digest].read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def write_prompts(path: Path, some: list[Window]) -> None:
    """Write a file of prompts."""
    lines = [json.dumps({"prompt": f"{_BOS}{window.prompt}"}) + "\n" for window in some]
    path.write_text("".join(lines))


def write_plain(path: Path, some: list[Window], distilled: Path) -> int:
    """Write records of the same prompts that go on as the library does; returns their tokens.

    Each has as many tokens to train on as the distilled record of its prompt.
    """
    records, bad = load_records(distilled)
    if bad or len(records) != len(some):
        raise ValueError(f"{distilled} has {len(records)} records for {len(some)} prompts")
    total = 0
    with path.open("w") as file:
        for record in records:
            (start, end), window = record.generated[0], some[record.index]
            ids = [*record.token_ids[:start], *window.continuation[: end - start]]
            line = {"index": record.index, "token_ids": ids, "generated": [[start, len(ids)]]}
            file.write(json.dumps(line | {"temperature": None}) + "\n")
            total += len(ids) - start
    return total
