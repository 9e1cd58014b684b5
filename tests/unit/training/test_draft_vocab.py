"""The draft vocabulary: which tokens, how many, and their coverage."""

import pytest
import torch

from vllm_medusa.offline.records import Record
from vllm_medusa.training.draft_vocab import (
    LARGEST,
    SMALLEST,
    count_tokens,
    coverage,
    frequent_tokens,
    usual_size,
)


def record(ids: tuple[int, ...], *spans: tuple[int, int]) -> Record:
    return Record(0, 1, "a", ids, spans)


def texts(*generated) -> list[Record]:
    """One text per prompt."""
    return [
        Record(n, n + 1, str(n), (n, *ids), ((1, 1 + len(ids)),)) for n, ids in enumerate(generated)
    ]


def test_the_most_frequent_generated_tokens_are_kept():
    records = [record((9, 9, 9, 9, 3, 3, 5), (4, 7)), record((7, 5, 6), (1, 2), (2, 3))]
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
    assert usual_size(texts(written, written), vocab) == size


def test_coverage_is_low_for_different_texts():
    apart = [range(20_000 + 30 * n, 20_030 + 30 * n) for n in range(8)]
    assert usual_size(texts(*apart), 50_000) == LARGEST  # though 240 tokens cover all of these
    assert usual_size(texts(apart[0]), 50_000) == LARGEST
    assert usual_size(texts(*apart[:1] * 8), 50_000) == SMALLEST
