"""Vocabulary shards per rank; real ranks are compared in tests/distributed."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from vllm_medusa.integration.drafters import sharding
from vllm_medusa.proposer.topk import NO_CANDIDATE, VocabShard


@dataclass
class Group:
    rank_in_group: int
    world_size: int

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        assert part.dtype == torch.float32, "shared memory only takes floats"
        return torch.cat([part] * self.world_size, dim)


def as_rank(patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    patch.setattr(sharding, "get_tp_group", lambda: Group(rank, ranks))


@pytest.mark.parametrize(("ranks", "num_ids"), [(2, 512), (3, 512), (4, 1001), (8, 513), (2, 129)])
def test_every_row_belongs_to_one_rank(monkeypatch, ranks, num_ids):
    ids = []
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        shard = sharding.shard_of_rows(num_ids)
        assert shard is not None and shard.num_ids > 0
        ids += range(shard.first_id, shard.first_id + shard.num_ids)
    assert ids == list(range(num_ids))


@pytest.mark.parametrize(("ranks", "num_ids"), [(1, 32000), (2, 127), (8, 500)])
def test_one_rank_or_few_rows_are_not_split(monkeypatch, ranks, num_ids):
    as_rank(monkeypatch, 0, ranks)
    assert sharding.shard_of_rows(num_ids) is None


def test_the_target_states_the_width_of_its_shards(monkeypatch):
    row = torch.zeros(1, 8)
    target = SimpleNamespace(compute_logits_local=lambda rows: rows.new_zeros(len(rows), 64))
    as_rank(monkeypatch, 1, 2)
    assert sharding.shard_of_target(target, row, 100) == VocabShard(64, 36)
    assert sharding.shard_of_target(SimpleNamespace(), row, 100) is None  # gathers, as before
    as_rank(monkeypatch, 0, 1)
    assert sharding.shard_of_target(target, row, 100) is None


def test_candidates_are_sent_without_rounding(monkeypatch):
    as_rank(monkeypatch, 0, 2)
    keys = torch.randint(NO_CANDIDATE, -NO_CANDIDATE - 1, (3, 4, 5))
    keys[0, 0] = NO_CANDIDATE
    gathered = sharding.all_gather(keys)
    assert torch.equal(gathered, torch.stack([keys, keys]))
