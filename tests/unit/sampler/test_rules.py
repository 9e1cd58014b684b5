"""The acceptance rules against plain loops; none waits for the device.

The walk emits the target's distribution: chi-square at 1e-6, fixed seeds; broken walks fail.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import UNLIKELY, deviations
from support.random_trees import Case, make_case, padded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_medusa import kv, sampler
from vllm_medusa.sampler import (
    Path,
    Verdict,
    accept_path,
    close_path,
    greedy_verdict,
    lossless_walk,
    typical_path,
)
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

# Few tokens, so that siblings often have equal tokens and paths get long.
cases = st.builds(
    make_case,
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    max_nodes=st.integers(1, 14),
    vocab=st.integers(1, 3),
    deep=st.booleans(),
)


def static(tree: TokenTree, *num_nodes: int) -> TreeBatch:
    return TreeBatch.from_static(TreeTensors.from_tree(tree), torch.tensor(num_nodes))


def assert_same(one: Verdict, other: Verdict) -> None:
    assert torch.equal(one.output_token_ids, other.output_token_ids)
    for name, part in vars(one.path).items():
        assert torch.equal(part, getattr(other.path, name)), name


def assert_path(case: Case, b: int, path: Path, nodes: list[int]) -> None:
    assert path.nodes[b].tolist() == padded(nodes, case.tree.max_depth + 1, nodes[-1])
    assert int(path.num_accepted[b]) == len(nodes) - 1
    assert int(path.last_node[b]) == nodes[-1]


@settings(max_examples=300)
@given(case=cases, seed=st.integers(0, 2**31))
def test_greedy_equals_a_walk_with_an_argmax_sampler(case, seed):
    torch.manual_seed(seed)
    argmax = torch.randint(0, case.vocab_size, case.tree.parents.shape)

    def sample(level, nodes, active):
        return argmax.gather(1, nodes.unsqueeze(1)).squeeze(1)

    walked = lossless_walk(case.tree, case.token_ids, sample)
    assert_same(greedy_verdict(case.tree, case.token_ids, argmax), walked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=100)
@given(case=cases, seed=st.integers(0, 2**31), spread=st.sampled_from([1, 3, 100]))
def test_the_greedy_kernel_for_cpus_walks_alike(dtype, case, seed, spread):
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
    assert_same(sampler.greedy_walk(logits, cu_nodes, tree, case.token_ids), expected)


def test_absent_drafts_and_truncated_nodes_are_never_accepted():
    tokens = torch.tensor([[0, 5, -1, 5], [0, 5, 5, 5], [0, 5, 5, 5]])
    tree = static(TokenTree.chain(3), 4, 2, 1)
    verdict = greedy_verdict(tree, tokens, torch.full((3, 4), 5))
    assert verdict.path.num_accepted.tolist() == [1, 1, 0]


def best(paths: dict[int, list[int]], score: list[float]) -> list[int]:
    """The longest path, then the one with the best score, then the first."""
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
        paths = {0: [0]}
        for node in range(1, int(case.tree.num_nodes[b])):
            parent = int(case.tree.parents[b, node])
            if accepted[b, node] and parent in paths:
                paths[node] = [*paths[parent], node]
        assert_path(case, b, path, best(paths, flat[b].tolist()))


def test_nan_and_infinite_scores_give_a_deepest_path():
    nan, inf = torch.nan, torch.inf
    score = torch.tensor([[0, nan, nan, nan], [0, nan, -inf, -5.0], [0, -inf, -inf, -inf]])
    tree = static(TokenTree.dense([3]), 4, 4, 4)
    path = accept_path(tree, torch.ones(3, 4, dtype=torch.bool), score)
    assert path.last_node.tolist() == [1, 3, 1]


def test_emitted_tokens_and_final_token():
    tree = static(TokenTree.from_paths([[0], [1], [1, 0]]), 4, 4, 4)
    path = sampler.path_to_node(tree, torch.tensor([3, 1, 0]))
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
    mixed = sampler.select_verdict(torch.tensor([True, False, True, False]), first, other)
    for b, source in enumerate([first, other, first, other]):
        assert torch.equal(mixed.output_token_ids[b], source.output_token_ids[b])
        for name, part in vars(mixed.path).items():
            assert torch.equal(part[b], getattr(source.path, name)[b]), name


def bar(p: list[float], epsilon: float, delta: float) -> float:
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return min(epsilon, delta * math.exp(-entropy))


def plausible(case: Case, b: int, probs: list, epsilon: float, delta: float) -> list[int]:
    paths, likelihood = {0: [0]}, [0.0] * case.tree.max_nodes
    for i in range(1, int(case.tree.num_nodes[b])):
        parent, token = int(case.tree.parents[b, i]), int(case.token_ids[b, i])
        if parent in paths and probs[parent][token] > bar(probs[parent], epsilon, delta):
            paths[i] = [*paths[parent], i]
            likelihood[i] = likelihood[parent] + math.log(probs[parent][token])
    # Rounded, so that sums that differ only in the last bits tie here too.
    return best(paths, [round(value, 4) for value in likelihood])


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
        assert_path(case, b, path, plausible(case, b, values, *bounds[:, b].tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_comparison_is_strict(dtype):
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0]] * 2] * 2, dtype=dtype)
    tokens = torch.tensor([[0, 1], [0, 1]])
    bounds = torch.tensor([0.5, 0.499], dtype=dtype)  # p is 0.5; delta exp(-ln 2) = 0.5 at delta 1
    tree = static(TokenTree.chain(1), 2, 2)
    path = typical_path(tree, tokens, probs, bounds, torch.ones(2, dtype=dtype))
    assert path.num_accepted.tolist() == [0, 1]


@pytest.fixture
def fake():
    """Tensors without values: reading one is an error."""
    tensors = TreeTensors.from_tree(TokenTree.dense([3, 2, 2]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tree = TreeBatch.from_static(tensors, torch.ones(4, dtype=torch.int64))
        yield tree, torch.zeros(4, tensors.num_nodes, dtype=torch.int64)


def test_rules_and_compaction_read_no_value(fake):
    tree, tokens = fake
    greedy = greedy_verdict(tree, tokens, tokens)
    probs = torch.rand(4, tree.max_nodes, 11)
    path = typical_path(tree, tokens, probs, torch.rand(4), torch.rand(4))
    typical = close_path(path, tokens, tokens[:, 0])
    mixed = sampler.select_verdict(torch.rand(4) > 0.5, greedy, typical)
    for verdict in (greedy, typical, mixed):
        assert verdict.output_token_ids.shape == (4, tree.max_depth + 1)
        src, dst = kv.accepted_moves(tokens, verdict.path.nodes, verdict.path.num_accepted)
        kv.copy_slots(torch.rand(2, 50, 3), src, dst, 1)
        kv.copy_slots(torch.rand(5, 3, 4, 10), src, dst, (0, 3))


def test_control_a_sync_is_detected(fake):
    def argmax(level: int, nodes: Tensor, active: Tensor) -> Tensor:
        return nodes % 11

    with pytest.raises(RuntimeError, match="numpy"):
        lossless_walk(*fake, argmax)


VOCAB = 4
SAMPLES = 40_000
# Including siblings with equal tokens: nodes 1 and 3 both have token 2.
TREE = TokenTree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0]])
TOKENS = torch.tensor([0, 2, 1, 2, 3, 0, 3, 1])
PATHS = [(), (2,), (1,), (2,), (2, 3), (2, 0), (1, 3), (2, 1)]  # tokens from the root to each node


class Target:
    """p(next | up to two tokens) over a small vocabulary, and three tokens sampled with a walk."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first = torch.softmax(0.7 * torch.randn(VOCAB), -1)
        self.second = torch.softmax(0.7 * torch.randn(VOCAB, VOCAB), -1)
        self.third = torch.softmax(0.7 * torch.randn(VOCAB, VOCAB, VOCAB), -1)

    def given(self, path: tuple[int, ...]) -> Tensor:
        return (self.first, self.second, self.third)[len(path)][path]

    def joint(self) -> Tensor:
        return self.first[:, None, None] * self.second[:, :, None] * self.third  # [V, V, V]

    def emit(self, walk_tree: TreeBatch) -> Tensor:
        """[S, 3] tokens: one step of the walk, then plain sampling up to three tokens."""
        rows = torch.stack([self.given(path) for path in PATHS])  # [N, V] as the scorer sees it

        def sample(level: int, nodes: Tensor, active: Tensor) -> Tensor:
            return torch.multinomial(rows[nodes], 1).squeeze(1)

        tokens = TOKENS.expand(SAMPLES, -1)
        out = lossless_walk(walk_tree, tokens, sample).output_token_ids.clone()  # [S, 3]
        for level, table in ((1, self.second), (2, self.third)):
            context = tuple(out[:, i] for i in range(level))
            fresh = torch.multinomial(table[context], 1).squeeze(1)
            out[:, level] = torch.where(out[:, level] < 0, fresh, out[:, level])
        return out


def histogram(tokens: Tensor) -> Tensor:
    places = VOCAB ** torch.arange(tokens.shape[1])
    return torch.bincount((tokens * places).sum(1), minlength=VOCAB ** tokens.shape[1])


def test_marginal_and_joint_distributions_equal_the_targets():
    target = Target()
    torch.manual_seed(1)
    out = target.emit(static(TREE, *[TREE.num_nodes] * SAMPLES))
    joint = target.joint()
    assert deviations(histogram(out[:, :1]), target.first) < UNLIKELY
    # In histogram() the first token varies fastest, so the tables are transposed to match.
    assert deviations(histogram(out[:, :2]), joint.sum(2).T) < UNLIKELY
    assert deviations(histogram(out), joint.permute(2, 1, 0)) < UNLIKELY


def test_control_a_wrong_parent_is_detected():
    """Node 6 (token 3 under node 2) accepted as a child of node 3, node 7 as one of node 2."""
    target = Target()
    torch.manual_seed(1)
    tree = static(TREE, *[TREE.num_nodes] * SAMPLES)
    parents = tree.parents.clone()
    parents[:, 4], parents[:, 6] = 2, 1  # both have token 3, under the wrong sibling
    out = target.emit(dataclasses.replace(tree, parents=parents))
    assert deviations(histogram(out), target.joint().permute(2, 1, 0)) > 2 * UNLIKELY


def test_control_unchecked_drafts_are_detected():
    """Accepting the first draft unless the sample is another child: its probability is too high."""
    target = Target()
    torch.manual_seed(1)
    out = target.emit(static(TREE, *[TREE.num_nodes] * SAMPLES))
    biased = torch.where((out[:, 0] == 0) & (torch.rand(SAMPLES) < 0.1), 2, out[:, 0])
    assert deviations(histogram(biased.unsqueeze(1)), target.first) > 2 * UNLIKELY


@settings(max_examples=100)
@given(case=cases, seed=st.integers(0, 2**31))
def test_the_path_follows_the_samples(case, seed):
    """Any samples, different at every visit: the walk is the plain loop."""
    torch.manual_seed(seed)
    levels = case.tree.max_depth + 1
    samples = torch.randint(0, case.vocab_size, (levels, case.batch_size))
    calls = []

    def sample(level, nodes, active):
        calls.append(active.clone())
        return torch.where(active, samples[level], 0)  # may match, but must be ignored

    verdict = lossless_walk(case.tree, case.token_ids, sample)
    for b in range(case.batch_size):
        drawn = iter(samples[:, b].tolist())
        nodes, emitted = case.walk(b, lambda node, drawn=drawn: next(drawn))
        assert_path(case, b, verdict.path, nodes)
        assert verdict.output_token_ids[b].tolist() == padded(emitted, levels, -1)
        assert sum(int(active[b]) for active in calls) == len(emitted)  # one draw per token
    assert all(bool(active.any()) for active in calls)
