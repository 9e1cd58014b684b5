"""Records in three files: to train on, to calibrate on, and to measure on.

The split is by prompts, as in `records.split_heldout`, so no prompt is in two files; and by
their contents only, so it does not depend on the order of the file's lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_medusa.offline.prompts import BadLines
from vllm_medusa.offline.records import Record, load_records, split_heldout, write_records

MIN_PROMPTS = 8  # min prompts held out, but at most half of them
FILES = ("train.jsonl", "calibration.jsonl", "measurement.jsonl")


class Split(NamedTuple):
    """Result of `split_records`, per file."""

    prompts: list[int]
    tokens: list[int]  # generated
    bad: BadLines
    disjoint: bool  # whether no prompt is in both the last two files


def split_records(source: Path, folder: Path, share: float) -> Split:
    """Write `FILES` into ``folder``, which must exist, in an order independent of the source's.

    ``share`` of the prompts is held out, at least `MIN_PROMPTS` if that leaves half. Half of
    them are to calibrate on, half to measure on; a single one is for both. Bad lines are skipped.

    Raises ValueError: fewer than two distinct prompts.
    """
    records, bad = load_records(source)
    prompts = _prompts(records)
    if prompts < 2:
        raise ValueError(
            f"{source} has records of {prompts} prompts; at least 2 are needed, one of them held "
            "out."
        )
    count = min(max(round(share * prompts), MIN_PROMPTS), prompts // 2)
    train, heldout = split_heldout(records, count / prompts)
    parts = [train, heldout, heldout]
    if disjoint := _prompts(heldout) > 1:
        parts[1:] = split_heldout(heldout, 0.5)
    for name, part in zip(FILES, parts, strict=True):
        write_records(folder / name, part)
    tokens = [sum(record.num_generated for record in part) for part in parts]
    return Split([_prompts(part) for part in parts], tokens, bad, disjoint)


def _prompts(records: Sequence[Record]) -> int:
    return len({record.prompt_key for record in records})
