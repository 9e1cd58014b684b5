"""Using three of five trained heads costs as much as three: products, memory, bytes read."""

import pytest
import torch
import torch.nn.functional as F
from support.random_heads import HIDDEN, VOCAB, RandomHeads, random_heads, write
from torch.utils.flop_counter import FlopCounterMode

from vllm_medusa.heads import load_heads
from vllm_medusa.heads.files import CheckpointFiles
from vllm_medusa.proposer import draft
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors

SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
TREE = TreeTensors.from_tree(TokenTree.dense([3, 2, 1]), torch.device("cpu"))


@pytest.fixture(params=[5, 1, 0], ids=["own LM heads", "one LM head", "target's"])
def five_and_three(request, tmp_path):
    """Checkpoints of five heads and of the first three of them."""
    five = random_heads(5, 2, num_lm_heads=request.param)
    three = RandomHeads(five.layers[:3], five.lm_heads[:3])
    folders = []
    for name, plain in (("five", five), ("three", three)):
        write(tmp_path / name / "model.safetensors", plain.spelled("vllm"))
        folders.append(tmp_path / name)
    return folders


def drafted(heads, hidden, lm_head):
    with FlopCounterMode(display=False) as counter:
        tokens = draft(heads, hidden, TREE, lambda rows: F.linear(rows, lm_head))
    return tokens, counter.get_total_flops()


def test_heads_the_tree_does_not_use_cost_nothing(five_and_three, hidden, target_lm_head):
    five, three = five_and_three
    part, _ = load_heads(five, max_heads=3, **SIZES)  # as in the worker
    whole, _ = load_heads(five, **SIZES)  # without knowledge of the tree
    small, _ = load_heads(three, **SIZES)
    wanted, cost = drafted(small, hidden, target_lm_head)
    assert cost > 0
    for heads in (part, whole):
        tokens, flops = drafted(heads, hidden, target_lm_head)
        assert torch.equal(tokens, wanted)
        assert flops == cost
    assert sum(p.numel() for p in part.parameters()) == sum(p.numel() for p in small.parameters())
    deeper = TreeTensors.from_tree(TokenTree.chain(5), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        draft(whole, hidden, deeper, lambda rows: F.linear(rows, target_lm_head))
    assert counter.get_total_flops() * 3 == cost * 5  # checks the counter itself


def test_other_heads_tensors_are_not_read(five_and_three, monkeypatch):
    five, three = five_and_three
    read = []
    original = CheckpointFiles.tensors

    def tensors(self, names):
        for name, tensor in original(self, names):
            read.append(name)
            yield name, tensor

    monkeypatch.setattr(CheckpointFiles, "tensors", tensors)
    load_heads(five, max_heads=3, **SIZES)
    of_five, read[:] = sorted(read), []
    load_heads(three, **SIZES)
    assert of_five == sorted(read)
