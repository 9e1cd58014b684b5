"""Rows and their labels against the definition, and the pieces they are cut into."""

import numpy as np
import pytest
import torch
from support.records import random_records

from vllm_medusa.offline.records import Record
from vllm_medusa.training.losses import IGNORED, head_labels, label_mask
from vllm_medusa.training.texts import Piece, Texts

K = 3


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("size", [1, 4, 128])
def test_pieces_have_exactly_the_labels_of_the_definition(size, soft):
    records = random_records()
    texts = Texts.of(records)
    found = set()
    for piece in texts.pieces(size):
        record = records[texts.record_of(piece)]
        start, stop = texts.needed(piece, K, soft=soft)
        labels = texts.labels(piece, K, soft=soft)
        assert labels.shape == (stop - start, K) and len(piece) <= size
        for row, head in zip(*np.nonzero(labels != IGNORED), strict=True):
            t = int(texts.span_position[piece.span]) + start + int(row)
            found.add((record.index, t, int(head), int(labels[row, head])))
            seen = texts.following(piece, K, soft=soft)[row, : head + 1]  # what Hydra's head sees
            assert seen.tolist() == list(record.token_ids[t + 1 : t + head + 2])
            if soft:  # the row whose state gives the label's distribution is there
                assert row + head + 1 < stop - start
    wanted = set()
    for record in records:
        length = len(record.token_ids)
        mask = label_mask(record.generated, length, K)
        labels = head_labels(torch.tensor(record.token_ids), mask)
        for t, head in mask.nonzero().tolist():
            wanted.add((record.index, t, head, int(labels[t, head])))
    assert found == wanted and len(wanted) > 50


def test_two_turns_by_hand():
    record = Record(0, 1, "a", (90, 91, 1, 2, 3, 92, 4, 5, 6, 7), ((2, 5), (6, 10)), 0.5)
    texts = Texts.of([record])
    assert texts.span_position.tolist() == [1, 5] and texts.first_row.tolist() == [0, 3, 7]
    assert texts.labels(Piece(0, 0, 2), 2, soft=False).tolist() == [[2, 3], [3, IGNORED]]
    assert texts.labels(Piece(1, 1, 3), 2, soft=True).tolist() == [
        [6, 7],
        [7, IGNORED],
        [IGNORED, IGNORED],
    ]
    assert texts.num_labels == 5 and texts.token_ids(0).tolist() == list(record.token_ids[:9])


def test_spans_too_short_for_a_label_are_left_out():
    texts = Texts.of([Record(0, 1, "a", (1, 2, 3, 4), ((1, 2), (2, 3)), None)])
    assert texts.num_rows == 0 and texts.pieces(8) == [] and len(texts.token_ids(0)) == 0


def test_the_digest_knows_everything_that_is_trained():
    records = random_records()
    digests = {Texts.of(records).digest()}
    one = records[3]
    for change in (
        {"token_ids": (*one.token_ids[:-1], 511)},
        {"temperature": 0.9},
        {"generated": ((0, len(one.token_ids)),)},
    ):
        changed = [*records[:3], Record(**{**vars(one), **change}), *records[4:]]
        digests.add(Texts.of(changed).digest())
    assert len(digests) == 4
    assert Texts.of(random_records()).digest() in digests
    moved = [Record(**{**vars(r), "line": r.line + 1}) for r in records]
    assert Texts.of(moved).digest() in digests  # the same texts elsewhere in a file
