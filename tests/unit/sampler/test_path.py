import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import Case, make_case, padded
from support.tree_strategies import cases

from vllm_medusa.sampler import accept_path, close_path, path_to_node, select_verdict
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors


def expected_path(case: Case, b: int, accepted: list[bool], score: list[float]) -> list[int]:
    paths = {0: [0]}
    for i in range(1, int(case.tree.num_nodes[b])):
        parent = int(case.tree.parents[b, i])
        if accepted[i] and parent in paths:
            paths[i] = [*paths[parent], i]
    return min(paths.values(), key=lambda p: (-len(p), -score[p[-1]], p[-1]))


@settings(max_examples=150)
@given(case=cases, seed=st.integers(0, 2**31), scored=st.booleans())
def test_longest_then_best_then_first(case, seed, scored):
    torch.manual_seed(seed)
    shape = case.tree.parents.shape
    accepted = torch.rand(shape) < 0.7
    score = torch.randint(0, 2, shape).float() if scored else None  # ties are common
    path = accept_path(case.tree, accepted, score)
    flat = score if scored else torch.zeros(shape)
    for b in range(case.batch_size):
        nodes = expected_path(case, b, accepted[b].tolist(), flat[b].tolist())
        assert path.nodes[b].tolist() == padded(nodes, case.tree.max_depth + 1, nodes[-1])
        assert int(path.num_accepted[b]) == len(nodes) - 1
        assert int(path.last_node[b]) == nodes[-1]


def test_nan_and_infinite_scores_give_a_deepest_path():
    tensors = TreeTensors.from_tree(TokenTree.dense([3]))
    tree = TreeBatch.from_static(tensors, torch.tensor([4, 4, 4]))
    nan, inf = torch.nan, torch.inf
    score = torch.tensor([[0, nan, nan, nan], [0, nan, -inf, -5.0], [0, -inf, -inf, -inf]])
    path = accept_path(tree, torch.ones(3, 4, dtype=torch.bool), score)
    assert path.last_node.tolist() == [1, 3, 1]


def test_a_tree_truncated_to_its_root_accepts_nothing():
    tensors = TreeTensors.from_tree(TokenTree.chain(3))
    tree = TreeBatch.from_static(tensors, torch.tensor([1]))
    path = accept_path(tree, torch.ones(1, 4, dtype=torch.bool))
    assert path.nodes.tolist() == [[0, 0, 0, 0]]
    assert path.num_accepted.tolist() == [0]


def test_emitted_tokens_and_final_token():
    tree = TreeBatch.from_static(
        TreeTensors.from_tree(TokenTree.from_paths([[0], [1], [1, 0]])), torch.tensor([4, 4, 4])
    )
    path = path_to_node(tree, torch.tensor([3, 1, 0]))
    tokens = torch.tensor([[9, 10, 11, 12]]).expand(3, -1)
    verdict = close_path(path, tokens, torch.tensor([50, 51, 52]))
    assert path.nodes.tolist() == [[0, 2, 3], [0, 1, 1], [0, 0, 0]]
    assert verdict.output_token_ids.tolist() == [[11, 12, 50], [10, 51, -1], [52, -1, -1]]
    assert verdict.final_token.tolist() == [50, 51, 52]


def test_select_verdict_mixes_requests():
    case = make_case(seed=1, batch=4, max_nodes=8, vocab=2)
    every = torch.ones(4, 8, dtype=torch.bool)
    first = close_path(accept_path(case.tree, every), case.token_ids, torch.full((4,), 7))
    other = close_path(accept_path(case.tree, ~every), case.token_ids, torch.full((4,), 8))
    mixed = select_verdict(torch.tensor([True, False, True, False]), first, other)
    for b, source in enumerate([first, other, first, other]):
        assert torch.equal(mixed.output_token_ids[b], source.output_token_ids[b])
        assert torch.equal(mixed.path.nodes[b], source.path.nodes[b])
        assert mixed.path.num_accepted[b] == source.path.num_accepted[b]
        assert mixed.path.last_node[b] == source.path.last_node[b]
