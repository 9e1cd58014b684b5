import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import padded
from support.tree_strategies import cases

from vllm_medusa.sampler import greedy_verdict, greedy_walk, lossless_walk
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors


@settings(max_examples=300)
@given(case=cases, seed=st.integers(0, 2**31))
def test_equals_a_walk_with_an_argmax_sampler(case, seed):
    torch.manual_seed(seed)
    argmax = torch.randint(0, case.vocab_size, case.tree.parents.shape)

    def sample(level, nodes, active):
        return argmax.gather(1, nodes.unsqueeze(1)).squeeze(1)

    one_shot = greedy_verdict(case.tree, case.token_ids, argmax)
    walked = lossless_walk(case.tree, case.token_ids, sample)
    assert torch.equal(one_shot.output_token_ids, walked.output_token_ids)
    assert torch.equal(one_shot.path.nodes, walked.path.nodes)
    assert torch.equal(one_shot.path.num_accepted, walked.path.num_accepted)
    assert torch.equal(one_shot.path.last_node, walked.path.last_node)
    for b in range(case.batch_size):
        nodes, emitted = case.walk(b, lambda node, b=b: int(argmax[b, node]))
        width = case.tree.max_depth + 1
        assert walked.path.nodes[b].tolist() == padded(nodes, width, nodes[-1])
        assert walked.output_token_ids[b].tolist() == padded(emitted, width, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=100)
@given(case=cases, seed=st.integers(0, 2**31), spread=st.sampled_from([1, 3, 100]))
def test_the_kernel_for_cpus_walks_alike(dtype, case, seed, spread):
    torch.manual_seed(seed)
    tree, width = case.tree, case.tree.max_nodes
    cu_nodes = tree.cu_num_nodes.to(torch.int64)
    rows = cu_nodes[:-1, None] + torch.arange(width).minimum(tree.num_nodes[:, None] - 1)
    # few values, so that many are equal; rows of a wider tensor, as vLLM's without its padding
    logits = torch.randint(-spread, spread, (int(cu_nodes[-1]), case.vocab_size + 5)).to(dtype)
    if seed % 3 == 0:
        logits[torch.rand(logits.shape) < 0.1] = torch.nan
    logits = logits[:, : case.vocab_size]
    expected = greedy_verdict(tree, case.token_ids, logits.float().argmax(-1)[rows])
    found = greedy_walk(logits, cu_nodes, tree, case.token_ids)
    assert torch.equal(found.output_token_ids, expected.output_token_ids)
    assert torch.equal(found.path.nodes, expected.path.nodes)
    assert torch.equal(found.path.num_accepted, expected.path.num_accepted)
    assert torch.equal(found.path.last_node, expected.path.last_node)


def test_absent_drafts_and_truncated_nodes_are_never_accepted():
    batch = TreeBatch.from_static(
        TreeTensors.from_tree(TokenTree.chain(3)), torch.tensor([4, 2, 1], dtype=torch.int32)
    )
    tokens = torch.tensor([[0, 5, -1, 5], [0, 5, 5, 5], [0, 5, 5, 5]])
    verdict = greedy_verdict(batch, tokens, torch.full((3, 4), 5))
    assert verdict.path.num_accepted.tolist() == [1, 1, 0]
