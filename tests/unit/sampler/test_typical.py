import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import Case, padded
from support.tree_strategies import cases

from vllm_medusa.sampler import typical_path
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors


def bar(p: list[float], epsilon: float, delta: float) -> float:
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return min(epsilon, delta * math.exp(-entropy))


def expected_path(case: Case, b: int, probs: list, epsilon: float, delta: float) -> list[int]:
    paths, likelihood = {0: [0]}, {0: 0.0}
    for i in range(1, int(case.tree.num_nodes[b])):
        parent, token = int(case.tree.parents[b, i]), int(case.token_ids[b, i])
        if parent in paths and probs[parent][token] > bar(probs[parent], epsilon, delta):
            paths[i] = [*paths[parent], i]
            likelihood[i] = likelihood[parent] + math.log(probs[parent][token])
    # Rounded, so that sums that differ only in the last bits tie here too.
    return min(paths.values(), key=lambda p: (-len(p), -round(likelihood[p[-1]], 4), p[-1]))


@settings(max_examples=200)
@given(
    case=cases, seed=st.integers(0, 2**31), epsilon=st.floats(0.01, 1.0), delta=st.floats(0.05, 1.0)
)
def test_longest_then_likeliest_then_first(case, seed, epsilon, delta):
    torch.manual_seed(seed)
    # Few distinct rows, some with zeros, so that ties and impossible tokens occur.
    rows = torch.softmax(2 * torch.randn(3, case.vocab_size + 1), -1)
    rows[0, 0] = 0
    rows = rows / rows.sum(-1, keepdim=True)
    probs = rows[torch.randint(0, 3, case.tree.parents.shape)]  # [B, N, V]
    # Requests differ: the last one accepts almost nothing.
    bounds = torch.tensor([[epsilon, delta]] * (case.batch_size - 1) + [[1.0, 1.0]]).T
    path = typical_path(case.tree, case.token_ids, probs, bounds[0], bounds[1])
    for b in range(case.batch_size):
        values = probs[b].double().tolist()
        nodes = expected_path(case, b, values, float(bounds[0, b]), float(bounds[1, b]))
        assert path.nodes[b].tolist() == padded(nodes, case.tree.max_depth + 1, nodes[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_comparison_is_strict(dtype):
    tree = TreeBatch.from_static(TreeTensors.from_tree(TokenTree.chain(1)), torch.tensor([2, 2]))
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0]] * 2] * 2, dtype=dtype)
    tokens = torch.tensor([[0, 1], [0, 1]])
    bounds = torch.tensor([0.5, 0.499], dtype=dtype)  # p is 0.5; delta exp(-ln 2) = 0.5 at delta 1
    path = typical_path(tree, tokens, probs, bounds, torch.ones(2, dtype=dtype))
    assert path.num_accepted.tolist() == [0, 1]
