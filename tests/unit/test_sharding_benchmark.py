"""The benchmark's arms draft the same tokens, and its numbers are what it says they are."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from benchmarks.sharding import (
    HEADS,
    RANKS,
    WIDTH,
    Shape,
    ShardingOptions,
    disagreement,
    make_arms,
    run,
    shapes,
    summary,
)
from vllm_medusa.job import SILENT
from vllm_medusa.proposer.sharded import VocabShard, token_ids
from vllm_medusa.proposer.topk import ranked

VOCAB, HIDDEN, BATCH = 203, 16, 3  # not even: the second rank's half is smaller


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_the_arms_agree(kind):
    """Both ranks in this process: each arm gathers what the other rank would send."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, HEADS, HIDDEN)
    weights = torch.randn(HEADS if kind == "own" else 1, VOCAB, HIDDEN)
    half = -(-VOCAB // 2)
    padded = F.pad(weights, (0, 0, 0, 2 * half - VOCAB))
    sent = {"replicated": [], "split": [], "gathered": []}
    drafted = []
    for replay, rank in product((False, True), (0, 1)):  # first to learn what each rank sends
        running = ""

        def gather(own, replay=replay):
            if not replay:
                sent[running].append(own)  # noqa: B023 - called within the same turn
            return torch.stack(sent[running] if replay else [own, own])  # noqa: B023

        shard = VocabShard.of_rank(rank, half, VOCAB)
        whole = [partial(F.linear, weight=w) for w in weights]
        part = [partial(F.linear, weight=w) for w in padded[:, rank * half :][:, :half]]
        keys = {}
        for running, arm in make_arms(
            Shape(kind, VOCAB, HIDDEN, "fp32"), whole, part, shard, gather
        ).items():
            keys[running] = arm(x)
        if replay:
            drafted += [token_ids(key) for key in keys.values()]
            assert disagreement(keys) < 1e-6
    logits = torch.stack([F.linear(x[:, h], weights[h % len(weights)]) for h in range(HEADS)], 1)
    expected = logits.topk(WIDTH).indices
    assert len(drafted) == 6 and all(torch.equal(tokens, expected) for tokens in drafted)


def test_disagreement_is_seen():
    keys = ranked(torch.linspace(-1, 1, 8), torch.arange(8))
    assert disagreement({"a": keys, "b": keys}) == 0
    assert disagreement({"a": keys, "b": keys.flip(0)}) > 0.5


def test_ratios_are_of_neighbouring_rounds():
    seconds = {"replicated": [1.0, 2.0, 4.0, 8.0], "split": [0.5, 1.0, 2.0, 8.0]}
    got = summary(seconds)
    assert got["replicated_ms"] == 3000 and got["split_ratio"] == 0.5
    assert got["split_quartiles"][0] == 0.5 and got["split_quartiles"][1] > 0.5


def test_what_does_not_fit_is_left_out():
    found = list(shapes(ShardingOptions(vocabs=(32_000,), hidden=(1024, 4096), memory_gb=1.0)))
    assert found == [
        Shape("own", 32_000, 1024, "bf16"),
        Shape("shared", 32_000, 1024, "bf16"),
        Shape("shared", 32_000, 4096, "bf16"),
    ]
    assert found[0].num_bytes() == 3 * 4 * 32_000 * 1024 * 2
    assert RANKS == 2


def test_two_real_ranks_give_a_row():
    options = ShardingOptions(
        dtypes=("fp32",), vocabs=(64,), hidden=(8,), batches=(2,), seconds=0.01
    )
    rows = [row.to_dict() for row in run(options, SILENT)]
    assert [(row["kind"], row["batch"]) for row in rows] == [("own", 2), ("shared", 2)]
    assert all(row["split_ratio"] > 0 and row["rounds"] >= 9 for row in rows)
