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


def test_the_first_of_equal_siblings_is_accepted_even_if_the_second_is_deeper():
    #      0            tokens: both children are 5; only the second has a child that matches
    #     / \
    #    1   2          The walk is at node 1 and must stop there.
    #        |
    #        3
    tree = TokenTree.from_paths([[0], [1], [1, 0]])
    batch = TreeBatch.from_static(TreeTensors.from_tree(tree), torch.tensor([4]))
    verdict = greedy_verdict(batch, torch.tensor([[0, 5, 5, 6]]), torch.tensor([[5, 6, 6, 7]]))
    assert verdict.path.nodes.tolist() == [[0, 1, 1]]
    assert verdict.output_token_ids.tolist() == [[5, 6, -1]]


def test_absent_drafts_and_truncated_nodes_are_never_accepted():
    batch = TreeBatch.from_static(
        TreeTensors.from_tree(TokenTree.chain(3)), torch.tensor([4, 2, 1], dtype=torch.int32)
    )
    tokens = torch.tensor([[0, 5, -1, 5], [0, 5, 5, 5], [0, 5, 5, 5]])
    verdict = greedy_verdict(batch, tokens, torch.full((3, 4), 5))
    assert verdict.path.num_accepted.tolist() == [1, 1, 0]
