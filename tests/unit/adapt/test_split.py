"""Texts to train, to calibrate and to measure on have no prompt in common."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_medusa.adapt.pipeline import FILES, split_texts
from vllm_medusa.files import read_json
from vllm_medusa.offline.records import Record, load_records


def lines(prompts: int, samples: int = 2, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "index": n,
            "request_id": f"r{n}",
            "token_ids": [5, n // samples, 7, 8, 20 + n % samples, 3],
        }
        | {"generated": [[3, 6]], "temperature": 0.7, **more}
        for n in range(prompts * samples)
    ]


def split(
    folder: Path,
    rows: list[dict[str, Any]],
    share: float = 0.1,
    bad: str = "refuse",
    tail: str = "",
) -> tuple[list[list[Record]], dict[str, Any]]:
    """The records of each file, and the counts."""
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    given = {"data": path, "output": folder, "heldout_share": share, "on_bad_line": bad}
    split_texts(given)
    return [load_records(folder / name)[0] for name in FILES], read_json(folder / "counts.json")


@pytest.mark.parametrize(
    ("prompts", "heldout"), [(2, 1), (3, 1), (4, 2), (8, 4), (32, 8), (200, 20)]
)
def test_no_prompt_is_on_both_sides(tmp_path, prompts, heldout):
    parts, counts = split(tmp_path, lines(prompts), bad="skip", tail="{\n")
    train, calibrate, measure = ({r.prompt_key for r in part} for part in parts)
    assert counts["prompts"] == [len(train), len(calibrate), len(measure)]
    assert counts["tokens"] == [3 * 2 * count for count in counts["prompts"]]
    assert not train & (calibrate | measure) and len(calibrate | measure) == heldout
    assert counts["disjoint"] == (heldout > 1) == calibrate.isdisjoint(measure)
    assert (calibrate == measure) == (heldout == 1) and counts["skipped_records"] == 1
    assert len(train) + heldout == prompts


def test_a_group_is_on_one_side_and_records_are_unchanged(tmp_path):
    rows = [row | {"group": f"{row['index'] % 20:064x}"} for row in lines(40, top_p=0.9, top_k=7)]
    parts, counts = split(tmp_path, rows, 0.4)
    groups = [{record.index % 20 for record in part} for part in parts]
    assert [len(part) for part in groups] == counts["prompts"] == [12, 4, 4]
    assert len(set().union(*groups)) == 20
    kept = {replace(record, line=0) for part in parts for record in part}
    assert kept == {replace(r, line=0) for r in load_records(tmp_path / "records.jsonl")[0]}


def test_the_files_do_not_depend_on_the_order_of_the_lines(tmp_path):
    written = []
    for seed in (1, 2):
        rows = lines(30)
        random.Random(seed).shuffle(rows)
        split(tmp_path, rows, 0.2)
        written.append([(tmp_path / name).read_bytes() for name in FILES])
    assert written[0] == written[1]


def test_one_prompt_is_too_few_and_bad_lines_are_refused(tmp_path):
    with pytest.raises(ValueError, match="records of 1 prompts"):
        split(tmp_path, lines(1, samples=5))
    with pytest.raises(ValueError, match="line 7"):
        split(tmp_path, lines(3), tail="{\n")
