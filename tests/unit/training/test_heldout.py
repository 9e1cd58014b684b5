import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_medusa.offline.records import Record, load_records
from vllm_medusa.training.heldout import FILES, split_records


def write(path: Path, prompts: int, samples: int = 2, *, shuffled: int | None = None) -> Path:
    lines = []
    for prompt in range(prompts):
        for sample in range(samples):
            ids = [5, prompt, 7, 8, 20 + sample, 3]
            index = prompt * samples + sample
            line = {"index": index, "request_id": f"r{index}", "token_ids": ids}
            lines.append(json.dumps(line | {"generated": [[3, 6]], "temperature": 0.7}))
    if shuffled is not None:
        random.Random(shuffled).shuffle(lines)
    path.write_text("\n".join(lines) + "\n")
    return path


def parts(folder: Path) -> list[list[Record]]:
    return [load_records(folder / name)[0] for name in FILES]


@pytest.mark.parametrize(
    ("prompts", "heldout"), [(2, 1), (3, 1), (4, 2), (8, 4), (32, 8), (200, 20)]
)
def test_no_prompt_is_on_both_sides(tmp_path, prompts, heldout):
    split = split_records(write(tmp_path / "r.jsonl", prompts), tmp_path, 0.1)
    counts, tokens, bad, disjoint = split
    train, calibration, measurement = parts(tmp_path)
    keys = [{record.prompt_key for record in part} for part in (train, calibration, measurement)]
    assert not bad
    assert counts == [len(part) for part in keys]
    assert tokens == [3 * 2 * len(part) for part in keys]
    assert not keys[0] & (keys[1] | keys[2])
    assert len(keys[1] | keys[2]) == heldout
    assert disjoint == keys[1].isdisjoint(keys[2])
    if heldout > 1:
        assert not keys[1] & keys[2]
        assert len(train) + len(calibration) + len(measurement) == 2 * prompts
    else:
        assert keys[1] == keys[2]
    assert all(record.temperature == 0.7 for record in train)


def test_a_group_is_on_one_side_and_records_are_unchanged(tmp_path):
    path = tmp_path / "r.jsonl"
    made = [json.loads(line) for line in write(path, 40).read_text().splitlines()]
    more = {"top_p": 0.9, "top_k": 7}
    groups = [line | more | {"group": f"{line['index'] % 20:064x}"} for line in made]
    path.write_text("".join(json.dumps(line) + "\n" for line in groups))
    counts, *_ = split_records(path, tmp_path, 0.4)
    assert counts == [12, 4, 4]
    written = parts(tmp_path)
    indices = [{record.index % 20 for record in part} for part in written]
    assert [len(part) for part in indices] == counts and len(set().union(*indices)) == 20
    kept = {replace(record, line=0) for part in written for record in part}
    assert kept == {replace(record, line=0) for record in load_records(path)[0]}


def test_the_files_do_not_depend_on_the_order_of_the_lines(tmp_path):
    written = []
    for seed in (None, 1, 2):
        split_records(write(tmp_path / "r.jsonl", 30, shuffled=seed), tmp_path, 0.2)
        written.append([(tmp_path / name).read_bytes() for name in FILES])
    assert written[0] == written[1] == written[2]


def test_one_prompt_is_too_few(tmp_path):
    with pytest.raises(ValueError, match="prompts"):
        split_records(write(tmp_path / "r.jsonl", 1, samples=5), tmp_path, 0.1)
