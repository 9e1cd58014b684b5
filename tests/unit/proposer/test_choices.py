"""Dynamic proposals: the heads' own confidences, equal on all ranks, with tokens at their nodes."""

import pytest
import torch

from vllm_medusa.proposer.build import build_tree
from vllm_medusa.proposer.choices import read_choices, read_choices_in_torch, read_choices_sharded
from vllm_medusa.proposer.topk import VocabShard, stable_topk
from vllm_medusa.tree.batch import TreeTensors
from vllm_medusa.tree.dynamic import widest_pool

BATCH, HEADS, VOCAB = 3, 4, 331
TREE = widest_pool(HEADS, VOCAB, num_nodes=60)
POOL = TreeTensors.from_tree(TREE)


class Marginals:
    def __init__(self, logits):
        self.logits = logits

    def marginals(self, depth, width):
        return read_choices(self.logits[:, :depth], width)


def grow(logits, num_nodes, max_depth):
    root = torch.zeros(BATCH, dtype=torch.int64)
    return build_tree(Marginals(logits), POOL, root, num_nodes, max_depth)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def logits(request):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(BATCH, HEADS + 1, VOCAB, generator=generator) * 4
    values[0, 1, :40] = values[0, 1].max()  # ties across shards
    return values.to(request.param)


@pytest.mark.parametrize("sharpness", [None, (0.5, 1.0, 2.0, 1.5)])
def test_confidence_is_the_probability(logits, sharpness):
    factors = None if sharpness is None else torch.tensor(sharpness)
    got = read_choices(logits[:, :HEADS], 7, factors)
    scaled = logits[:, :HEADS].double() * (1 if factors is None else factors[:, None].double())
    expected = scaled.log_softmax(-1).gather(-1, got.token_ids)
    assert torch.equal(got.token_ids, stable_topk(logits[:, :HEADS], 7))
    torch.testing.assert_close(got.log_confidence.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "width"), [(5, 5), (37, 1), (VOCAB, 7), (49_152, 64)])
def test_the_kernel_equals_torch(dtype, vocab, width):
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(2)).mul(4).to(dtype)
    logits[0, 1] = 1.5  # ties
    logits[0, 2, ::2] = logits[0, 2].max()
    logits[1, 0, 1:] = -torch.inf
    logits[1, 1, ::3] = -torch.inf
    for given in (logits, logits[:, 1:], logits.repeat(1, 1, 2)[..., 1 : 1 + vocab]):
        factors = torch.tensor([0.5, 1.0, 1.7])[: given.shape[1]]
        got, expected = (
            read(given, width, factors) for read in (read_choices, read_choices_in_torch)
        )
        assert torch.equal(got.token_ids, expected.token_ids)
        torch.testing.assert_close(got.log_confidence, expected.log_confidence)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_equal_the_full_vocabulary(logits, ranks):
    width = -(-VOCAB // ranks)
    shards = [VocabShard.of_rank(rank, width, VOCAB) for rank in range(ranks)]
    columns = [
        torch.nn.functional.pad(
            logits[..., s.first_id : s.first_id + s.num_ids], (0, width - s.num_ids), value=99.0
        )
        for s in shards
    ]
    factors = torch.tensor([1.0, 0.7, 1.3, 1.0])
    sent = []
    for shard, own in zip(shards, columns, strict=True):
        read_choices_sharded(
            own[:, :HEADS], 7, shard, lambda keys: (sent.append(keys), keys[None])[1], factors
        )
    results = [
        read_choices_sharded(own[:, :HEADS], 7, shard, lambda _: torch.stack(sent), factors)
        for shard, own in zip(shards, columns, strict=True)
    ]
    whole = read_choices(logits[:, :HEADS], 7, factors)
    for result in results:
        assert torch.equal(result.token_ids, whole.token_ids)
        assert torch.equal(result.log_confidence, results[0].log_confidence)  # bit by bit
        torch.testing.assert_close(result.log_confidence, whole.log_confidence)


def test_nothing_deeper_than_useful(logits):
    proposal = grow(logits, 60, torch.tensor([0, 1, 4]))
    trees = proposal.topology(HEADS)
    counts = proposal.num_nodes.tolist()
    assert counts[0] == 1 and 1 < counts[1] < 60 and counts[2] == 60
    for row, depth in enumerate((0, 1, 4)):
        assert int(trees.depths[row, : counts[row]].max()) == depth


def test_nan_logits_break_nothing(logits):
    logits[1] = float("nan")
    logits[2, :, 5] = float("inf")
    choices = read_choices(logits[:, :HEADS], POOL.width)
    proposal = grow(logits, 12, torch.tensor([4, 4, 4]))
    assert not choices.log_confidence.isnan().any() and proposal.num_nodes.min() >= 1
    assert (proposal.parents[:, 1:] < torch.arange(1, 12)).all() and (
        proposal.parents[:, 1:] >= 0
    ).all()
