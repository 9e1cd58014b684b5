import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import padded
from support.tree_strategies import cases

from vllm_medusa.sampler import greedy_verdict, lossless_walk
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors


@settings(max_examples=300)
@given(case=cases, seed=st.integers(0, 2**31))
def test_equals_the_walk_with_an_argmax_sampler(case, seed):
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


def test_absent_drafts_and_cut_nodes_are_never_accepted():
    batch = TreeBatch.from_static(
        TreeTensors.from_tree(TokenTree.chain(3)), torch.tensor([4, 2, 1], dtype=torch.int32)
    )
    tokens = torch.tensor([[0, 5, -1, 5], [0, 5, 5, 5], [0, 5, 5, 5]])
    verdict = greedy_verdict(batch, tokens, torch.full((3, 4), 5))
    assert verdict.path.num_accepted.tolist() == [1, 1, 0]
