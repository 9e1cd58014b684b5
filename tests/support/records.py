"""Records of random tokens."""

from __future__ import annotations

import random

from vllm_medusa.offline.records import Record


def random_records(count: int = 12, seed: int = 0) -> list[Record]:
    """Several spans each, also at the edges."""
    rng = random.Random(seed)
    records = []
    for index in range(count):
        length = rng.randrange(2, 40)
        cuts = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randint(1, 3))))
        spans = tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b)
        ids = tuple(rng.randrange(512) for _ in range(length))
        heat = rng.choice([None, 0.0, 0.7])
        records.append(Record(index, index + 10, str(index), ids, spans, heat))
    return records
