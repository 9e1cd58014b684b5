"""Rows and their labels against the definition, pieces, steps and passes; draft vocabularies."""

import itertools

import numpy as np
import pytest
import torch
from support.data import random_records

from vllm_medusa.offline.records import Record
from vllm_medusa.training.draft_vocab import (
    LARGEST,
    SMALLEST,
    count_tokens,
    coverage,
    default_size,
    frequent_tokens,
)
from vllm_medusa.training.rows import IGNORED, Texts, deal, plan_steps, split_passes

K = 3


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [1, 4, 128])
def test_pieces_have_exactly_the_defined_labels(size, whole):
    records = random_records()
    texts, found = Texts(records), []
    for piece in texts.cut(size, whole=whole):
        record = records[texts.record_of(piece.start)]
        first = int(texts.first[texts.record_of(piece.start)])
        rows = torch.arange(piece.start, piece.stop)
        labels, seen = texts.labels(rows, K, own=True), texts.after(rows, K)
        assert labels.shape == (piece.num_rows, 1 + K) and piece.num_rows <= size
        for row, head in (labels != IGNORED).nonzero().tolist():
            t = piece.start + row - first
            found.append((record.index, t, head - 1, int(labels[row, head])))
            path = seen[row, :head].tolist()  # input of Hydra's head
            assert path == list(record.token_ids[t + 1 : t + head + 1])
            assert piece.start + row + head < piece.limit  # the state for the label's distribution
        assert torch.equal(texts.labels(rows, K), labels[:, 1:])
    wanted = [
        (r.index, t, head, r.token_ids[t + head + 2])
        for r in records
        for t in range(len(r.token_ids))
        for head in range(-1, K)
        if any(s <= t + 1 and t + head + 2 < e for s, e in r.generated)
    ]
    heads = [each for each in wanted if each[2] >= 0]
    assert sorted(each for each in found if each[2] >= 0) == sorted(heads) and len(heads) > 50
    assert set(found) <= set(wanted)
    assert texts.count_labels() == sum(head == 0 for _, _, head, _ in wanted)


def test_two_turns_by_hand():
    record = Record(0, 1, "a", (90, 91, 1, 2, 3, 92, 4, 5, 6, 7), ((2, 5), (6, 10)), 0.5)
    texts = Texts([Record(1, 2, "b", (1, 2, 3, 4), ((1, 2), (2, 3))), record])  # too short first
    assert texts.cut(2) == [(5, 7, 8), (7, 8, 8), (9, 11, 13), (11, 13, 13)]
    assert texts.cut(100, whole=True) == [(0, 2, 2), (4, 13, 13)]
    assert texts.labels(torch.arange(5, 7), 2).tolist() == [[2, 3], [3, IGNORED]]
    labels = texts.labels(torch.arange(10, 13), 2, own=True).tolist()
    assert labels == [[5, 6, 7], [6, 7, IGNORED], [7, IGNORED, IGNORED]]
    assert texts.count_labels() == 5


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [16, 50, 10_000])
def test_every_item_occurs_once_per_epoch(epochs, batch):
    rows = np.random.default_rng(0).integers(1, 17, 200).tolist()
    steps = plan_steps(rows, batch=batch, epochs=epochs, seed=1)
    seen = np.bincount(np.concatenate(steps), minlength=200)
    assert seen.tolist() == [epochs] * 200 and all(steps)
    sizes = [sum(rows[i] for i in step) for step in steps]
    assert max(sizes[:-1], default=0) < batch + 16 and sizes[-1] < 2 * batch + 16 * epochs
    assert steps != [sorted(step) for step in steps]  # shuffled
    assert plan_steps(rows, batch=batch, epochs=epochs, seed=1) == steps
    assert plan_steps(rows, batch=batch, epochs=epochs, seed=2)[0] != steps[0]


def test_long_items_leave_no_step_empty():
    steps = plan_steps([100, 5, 100, 5], batch=10, epochs=1, seed=0)
    assert sorted(item for step in steps for item in step) == [0, 1, 2, 3] and all(steps)


def test_groups_stay_adjacent():
    groups = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4]
    steps = plan_steps([2] * 10, groups, batch=2, epochs=2, seed=0)
    stream = [groups[item] for step in steps for item in step]
    for epoch in (stream[:10], stream[10:]):
        assert sum(a != b for a, b in itertools.pairwise(epoch)) == 4
    assert stream[:10] != stream[10:]  # every epoch has a different order


def test_items_are_distributed_evenly_and_passes_fit():
    rows = [5, 1, 1, 9, 4, 4, 2, 2]
    parts = deal(range(8), rows, 4)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert max(sum(rows[i] for i in part) for part in parts) <= 28 / 4 + 9
    assert deal([0], [3], 3) == [[0], [], []]
    for size in (3, 9, 100):
        passes = split_passes(range(8), rows, size)
        assert sorted(i for part in passes for i in part) == list(range(8))
        assert all(len(p) == 1 or len(p) * max(rows[i] for i in p) <= size for p in passes)
    assert split_passes([], rows, 9) == []


def texts(*generated) -> list[Record]:
    """One text per prompt."""
    return [
        Record(n, n + 1, str(n), (n, *ids), ((1, 1 + len(ids)),)) for n, ids in enumerate(generated)
    ]


def test_the_most_frequent_generated_tokens_are_kept():
    one = Record(0, 1, "a", (9, 9, 9, 9, 3, 3, 5), ((4, 7),))
    records = [one, Record(1, 2, "b", (7, 5, 6), ((1, 2), (2, 3)))]
    counts = count_tokens(records, 12)
    assert frequent_tokens(counts, 1).tolist() == [3]  # of 3 and 5, twice each
    assert frequent_tokens(counts, 3).tolist() == [3, 5, 6]
    assert frequent_tokens(counts, 5).tolist() == [0, 1, 3, 5, 6]  # not 9 or 7, in prompts only
    assert len(frequent_tokens(counts, 50)) == 12
    assert frequent_tokens(counts, 3, {11}).tolist() == [3, 5, 11]  # an end token
    assert coverage(counts, torch.tensor([3, 6])) == 3 / 5


@pytest.mark.parametrize(
    ("used", "vocab", "size"),
    [
        (100, LARGEST, None),  # not larger than a draft vocabulary
        (100, LARGEST + 1, SMALLEST),
        (5000, 50_000, 5120),  # 4950 cover 99%
        (6300, 50_000, 7168),  # 6237 cover 99%
        (40_000, 50_000, LARGEST),
    ],
)
def test_the_default_size_covers_generated_texts(used, vocab, size):
    written = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:used].tolist()
    assert default_size(texts(written, written), vocab) == size


def test_coverage_is_low_for_different_texts():
    apart = [range(20_000 + 30 * n, 20_030 + 30 * n) for n in range(8)]
    assert default_size(texts(*apart), 50_000) == LARGEST  # though 240 tokens cover all of these
    assert default_size(texts(apart[0]), 50_000) == LARGEST
    assert default_size(texts(*apart[:1] * 8), 50_000) == SMALLEST
