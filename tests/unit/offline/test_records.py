import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import chat

from vllm_medusa.offline.records import (
    Record,
    digest_of,
    load_records,
    split_heldout,
    write_records,
)


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = {"index": 4, "request_id": "a", "token_ids": [5, 6, 7, 8], "generated": [[1, 2], [2, 4]]}


def test_the_native_form(tmp_path):
    more = {"temperature": 1, "seed": 3, "finish_reason": "stop", "text": "x"}
    path = write(tmp_path / "r.jsonl", GOOD | more, {**GOOD, "index": 0, "temperature": None})
    (second, first), _ = load_records(path, vocab_size=9)
    assert first == Record(4, 1, "a", (5, 6, 7, 8), ((1, 2), (2, 4)), 1.0)
    assert first.num_generated == 3
    assert second == Record(0, 2, "a", (5, 6, 7, 8), ((1, 2), (2, 4)), None)


def test_records_are_written_as_read(tmp_path):
    cut = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "group": "a1"}
    path = write(tmp_path / "r.jsonl", GOOD | cut, {**GOOD, "index": 5, "temperature": None})
    records, bad = load_records(path)
    assert not bad and [r.truncated for r in records] == [True, False]
    write_records(tmp_path / "again.jsonl", records)
    assert load_records(tmp_path / "again.jsonl") == (records, {})


def test_the_digest_covers_all_training_data():
    one = Record(0, 1, "a", (1, 2, 3, 4, 5), ((1, 2), (3, 5)), None)
    changes = (
        {},
        {"token_ids": (1, 2, 3, 4, 6)},
        {"generated": ((3, 5),)},  # a span without labels for heads counts in the target's own loss
        {"generated": ((2, 3), (3, 5))},
        {"temperature": 1.0},
        {"temperature": 0.7},
    )
    two = Record(1, 2, "b", (7, 8), ((1, 2),), None)
    digests = {digest_of([replace(one, **change), two]) for change in changes}
    assert len(digests) == len(changes)
    assert digest_of([replace(one, line=9, index=4), two]) in digests
    assert digest_of([two, one]) not in digests


def test_all_formats_in_one_file(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    path = write(
        tmp_path / "r.jsonl",
        GOOD,
        b"",
        {"id": "m", "messages": talk},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
        {"text": "import os\n"},
    )
    tokenizer = chat.tokenizer(chat.CHATML)
    records = sorted(load_records(path, tokenizer)[0], key=lambda record: record.line)
    places = [(r.index, r.line, r.request_id) for r in records]
    assert places == [(4, 1, "a"), (1, 3, "m"), (2, 4, "2"), (3, 5, "3")]
    assert records[1].token_ids == records[2].token_ids
    ((start, end),) = records[1].generated
    assert tokenizer.decode(records[1].token_ids[start:end]) == "Hello!<|im_end|>"
    assert records[3].generated == ((1, len(records[3].token_ids)),)
    assert all(r.temperature is None for r in records)


BAD = [
    (b"[" * 100_000, "not JSON: "),
    (b"\xff{}", "not UTF-8 text: invalid start byte at byte 0"),
    ({"index": 1, "error": "too long"}, "an error instead of a record: too long"),
    ({"prompt": "x"}, "no key 'token_ids' or 'messages' or 'conversations' or 'text'; the"),
    ({"text": "x"}, "'text' needs the target's tokenizer"),
    ({"token_ids": [1], "text": "x"}, "no key 'generated'"),
    (GOOD | {"token_ids": [5, 6, "7", 8]}, "token_ids[2] is '7': Input should be a valid integer"),
    (GOOD | {"token_ids": [5, 6, 7, 9]}, "token_ids[3] is 9, outside the vocabulary (from 0 to 8)"),
    (GOOD | {"token_ids": [5, -1, 7, 8]}, "token_ids[1] is -1, outside"),
    (GOOD | {"generated": []}, "no generated span"),
    (GOOD | {"generated": [[1, 5]]}, "[1, 5) is empty, overlaps the previous one or is outside"),
    (GOOD | {"generated": [[0, 3], [2, 4]]}, "[2, 4) is empty, overlaps"),
    (GOOD | {"temperature": float("nan")}, "temperature is nan: Input should be a finite number"),
    (GOOD | {"token_ids": [5] * 7}, "7 tokens; at most 6 are allowed"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_errors_state_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path / "r.jsonl", GOOD, b"", row, GOOD)
    records, bad = load_records(path, vocab_size=9, max_tokens=6)
    assert list(bad) == [3]
    assert reason in bad[3]
    assert [record.line for record in records] == [1, 4]


def test_the_tokenizer_bounds_the_vocabulary(tmp_path):
    tokenizer = chat.tokenizer(None)
    path = write(tmp_path / "r.jsonl", GOOD | {"token_ids": [1, 2, 3, len(tokenizer)]})
    _, bad = load_records(path, tokenizer)
    assert "outside the vocabulary" in bad[1]
    _, bad = load_records(path, tokenizer, vocab_size=len(tokenizer) + 1)  # a padded embedding
    assert not bad


def rows(prompts: int, samples: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    return [
        {
            "index": p * samples + s,
            "token_ids": [0, p, p + 1, *(generator.randrange(50) for _ in range(4))],
            "generated": [[3, 7]],
        }
        for p in range(prompts)
        for s in range(samples)
    ]


def test_the_order_of_the_lines_makes_no_difference(tmp_path):
    made = rows(20, 3)
    tidy, _ = load_records(write(tmp_path / "a.jsonl", *made))
    random.Random(1).shuffle(made)
    shuffled, bad = load_records(write(tmp_path / "b.jsonl", *made, {"token_ids": []}))
    assert list(bad) == [61]
    plain = [[(r.index, r.token_ids) for r in records] for records in (tidy, shuffled)]
    assert plain[0] == plain[1]
    sides = [
        [[r.index for r in side] for side in split_heldout(records, 0.3)]
        for records in (tidy, list(reversed(shuffled)))
    ]
    assert sides[0] == sides[1]
    assert sides[0][0] == sorted(sides[0][0])


@pytest.mark.parametrize("grouped", [False, True])
def test_samples_of_a_prompt_or_records_of_a_group_are_on_one_side(tmp_path, grouped):
    """Parts of a conversation start differently; only their group identifies them."""
    made = rows(20, 3)
    if grouped:
        made = [row | {"group": f"{row['index'] % 10:064x}"} for row in made]
    records, _ = load_records(write(tmp_path / "a.jsonl", *made))
    num_units = 10 if grouped else 20
    for share, units in ((0.01, 1), (0.3, 0.3 * num_units), (0.99, num_units - 1)):
        sides = split_heldout(records, share)
        seen = [{r.index % 10 if grouped else r.token_ids[1] for r in side} for side in sides]
        assert not seen[0] & seen[1] and len(seen[1]) == units
        assert len(sides[1]) == units * 60 / num_units == 60 - len(sides[0])
    assert split_heldout(records, 0) == (records, [])
    third = {r.index for r in split_heldout(records, 0.3)[1]}
    assert third < {r.index for r in split_heldout(records, 0.5)[1]}


def test_a_split_that_leaves_a_side_empty_is_refused(tmp_path):
    records, _ = load_records(write(tmp_path / "a.jsonl", *rows(1, 3)))
    with pytest.raises(ValueError, match="3 records of 1 prompt;"):
        split_heldout(records, 0.1)
