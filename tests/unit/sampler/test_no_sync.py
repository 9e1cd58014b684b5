"""The hot path has no host sync: it runs on fake tensors, which have no values."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from vllm_medusa import kv, sampler
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

VOCAB = 11


@pytest.fixture
def fake():
    tensors = TreeTensors.from_tree(TokenTree.dense([3, 2, 2]))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tree = TreeBatch.from_static(tensors, torch.ones(4, dtype=torch.int64))
        yield tree, torch.zeros(4, tensors.num_nodes, dtype=torch.int64)


def argmax(level: int, nodes: Tensor, active: Tensor) -> Tensor:
    return nodes % VOCAB


def test_rules_and_compaction(fake):
    tree, tokens = fake
    greedy = sampler.greedy_verdict(tree, tokens, tokens)
    probs = torch.rand(4, tree.max_nodes, VOCAB)
    path = sampler.typical_path(tree, tokens, probs, torch.rand(4), torch.rand(4))
    typical = sampler.close_path(path, tokens, tokens[:, 0])
    mixed = sampler.select_verdict(torch.rand(4) > 0.5, greedy, typical)
    for verdict in (greedy, typical, mixed):
        assert verdict.output_token_ids.shape == (4, tree.max_depth + 1)
        src, dst = kv.accepted_moves(tokens, verdict.path.nodes, verdict.path.num_accepted)
        kv.copy_slots(torch.rand(2, 50, 3), src, dst, 1)
        kv.copy_slots(torch.rand(5, 3, 4, 10), src, dst, (0, 3))


def test_control_a_sync_is_detected(fake):
    tree, tokens = fake
    with pytest.raises(DataDependentOutputException):
        sampler.lossless_walk(tree, tokens, argmax)
