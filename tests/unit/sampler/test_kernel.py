"""The sampler's kernels against the torch rules, interpreted here and compiled on a GPU.

Paths and tokens must be bitwise equal. Typical acceptance also computes probabilities; its cases
have no node so close to the threshold that rounding (about 1e-6) could change a decision, so paths
must equal those in fp64. How close it may get is tested separately.
"""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")
from support.ahead_of_time import GENERATIONS, compiling
from support.interpreter import IN_INTERPRETER, NOT_INTERPRETING
from support.random_trees import Case, make_case
from torch import Tensor

from vllm_medusa import sampler
from vllm_medusa.sampler import Path, Verdict
from vllm_medusa.sampler import launch as kernel
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeBatch, TreeTensors

POISON = -77
SIZES = [1, 2, 63, 64, 65, 128, 129, 256]
SHAPES = {
    "chain": lambda n: [[0] * (i + 1) for i in range(n - 1)],
    "star": lambda n: [[i] for i in range(n - 1)],
    "comb": lambda n: [[0] * (i // 2) + [i % 2] for i in range(n - 1)],
}


def moved(tree: TreeBatch, device: str) -> TreeBatch:
    values = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    return TreeBatch(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})


def static(paths: list[list[int]], num_nodes: list[int], dtype=torch.int64) -> TreeBatch:
    """The prefixes of one tree; views with strides of 0 and of a longer row."""
    spare = [[len(paths) + 1]] if len(paths) < 255 else []
    tensors = TreeTensors.from_tree(TokenTree.from_paths([*paths, *spare]))
    return TreeBatch.from_static(
        tensors.prefix(max(num_nodes)), torch.tensor(num_nodes, dtype=dtype)
    )


def poisoned_path(tree: TreeBatch, device: str) -> tuple[Path, Tensor]:
    """A path to write into, inside a larger buffer, and that buffer."""
    batch, columns = tree.batch_size, tree.max_depth + 1
    memory = torch.full((batch + 1, columns + 5), POISON, device=device)
    ends = torch.full((2, batch), POISON, device=device)
    return Path(memory[:-1, :columns], ends[0], ends[1]), memory


def same_path(path: Path, expected: Path) -> None:
    assert path.nodes.cpu().tolist() == expected.nodes.tolist()
    assert path.num_accepted.cpu().tolist() == expected.num_accepted.tolist()
    assert path.last_node.cpu().tolist() == expected.last_node.tolist()


def same_verdict(verdict: Verdict, expected: Verdict) -> None:
    same_path(verdict.path, expected.path)
    assert verdict.output_token_ids.cpu().tolist() == expected.output_token_ids.tolist()


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    case = make_case(
        seed, rng.randint(1, 4), rng.randint(1, 20), rng.randint(1, 3), rng.random() < 0.5
    )
    absent = torch.rand(case.token_ids.shape, generator=generator(seed)) < 0.05
    case.token_ids[absent] = -1
    return case


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str

    def walk(self, tree: TreeBatch, tokens: Tensor, targets: Tensor) -> Verdict:
        path, memory = poisoned_path(tree, self.device)
        output, output_memory = poisoned_path(tree, self.device)
        verdict = kernel.target_verdict(
            moved(tree, self.device),
            tokens.to(self.device),
            targets.to(self.device),
            Verdict(path, output.nodes),
        )
        for whole in (memory, output_memory):
            assert (whole[-1] == POISON).all() and (whole[:, -5:] == POISON).all()
        return verdict

    def check_walk(self, tree: TreeBatch, tokens: Tensor, targets: Tensor) -> Verdict:
        def sample(level: int, nodes: Tensor, active: Tensor) -> Tensor:
            return targets.gather(1, nodes.unsqueeze(1)).squeeze(1)

        verdict = self.walk(tree, tokens, targets)
        same_verdict(verdict, sampler.greedy_verdict(tree, tokens, targets))
        same_verdict(verdict, sampler.lossless_walk(tree, tokens, sample))
        return verdict

    def test_random_batches_walk(self):
        accepted = 0
        for seed in range(50):
            case = random_case(seed)
            shape = case.token_ids.shape
            targets = torch.randint(0, case.vocab_size, shape, generator=generator(seed))
            accepted += int(self.check_walk(case.tree, case.token_ids, targets).path.nodes.max())
        assert accepted > 60

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("nodes", SIZES)
    def test_boundaries_walk(self, nodes, shape):
        """Everything is accepted; the last node is cut off; nothing matches."""
        tree = static(SHAPES[shape](nodes), [nodes, max(1, nodes - 1), nodes], torch.int32)
        parents = tree.parents[0].clamp(min=0)
        tokens = torch.arange(nodes).expand(3, -1) + 1000
        targets = torch.zeros(3, nodes, dtype=torch.int64)
        for node in range(1, nodes):  # the last child of each node
            targets[:, parents[node]] = tokens[0, node]
        targets[2] = 7
        verdict = self.check_walk(tree, tokens, targets)
        if shape == "chain":
            assert verdict.path.num_accepted.tolist() == [nodes - 1, max(0, nodes - 2), 0]

    def test_tokens_as_views(self):
        """Tokens and targets as rows of a longer buffer."""
        case = make_case(3, 4, 20, 2)
        targets = torch.randint(0, 2, (4, 33), generator=generator(0))[:, 9:29]
        wide = torch.full((4, 31), 1)
        wide[:, :20] = case.token_ids
        self.check_walk(case.tree, wide[:, :20], targets)

    def test_a_wrong_parent_is_detected(self):
        """Negative control."""
        case = make_case(1, 4, 30, 1)
        targets = torch.zeros_like(case.token_ids)
        expected = self.check_walk(case.tree, case.token_ids, targets)
        parents = case.tree.parents.clone()
        parents[:, 1] = 5
        wrong = dataclasses.replace(case.tree, parents=parents)
        nodes = self.walk(wrong, case.token_ids, targets).path.nodes
        assert not torch.equal(nodes, expected.path.nodes)

    def typical(self, tree, tokens, logits, rows, epsilon, delta) -> Path:
        arguments = [t.to(self.device) for t in (tokens, logits, rows, epsilon, delta)]
        return kernel.typical_path(moved(tree, self.device), *arguments)

    def check_typical(self, tree, tokens, logits, rows, epsilon, delta) -> Path:
        path = self.typical(tree, tokens, logits, rows, epsilon, delta)
        probs = logits[rows].double().softmax(-1)
        expected = sampler.typical_path(tree, tokens, probs, epsilon.double(), delta.double())
        same_path(path, expected)
        return path

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_random_batches_typical(self, dtype, monkeypatch):
        """Ragged logits in several parts, truncated rows with whole parts of -inf, NaN rows."""
        monkeypatch.setattr(kernel, "_SPLIT", 16)
        accepted = 0
        for seed in range(12 if dtype is torch.float32 else 4):
            case = random_case(seed)
            tree, gen, vocab = case.tree, generator(seed), 40
            cu = torch.nn.functional.pad(tree.num_nodes.cumsum(0), (1, 0))
            node = torch.arange(tree.max_nodes)
            rows = cu[:-1, None] + torch.minimum(node, tree.num_nodes[:, None] - 1)
            memory = torch.full((int(cu[-1]), vocab + 3), torch.nan, dtype=dtype)
            logits = memory[:, :vocab]
            logits.copy_(2 * torch.randn(logits.shape, generator=gen))
            logits[:, : case.vocab_size] += 5
            logits[torch.rand(logits.shape, generator=gen) < 0.3] = -torch.inf
            logits[torch.rand(len(logits), generator=gen) < 0.3, 16:] = -torch.inf
            logits[torch.rand(len(logits), generator=gen) < 0.1, 20:] = -3e38 if seed % 2 else -9e4
            bad = torch.rand(len(logits), generator=gen)
            logits[bad < 0.05, 17] = torch.nan
            logits[(bad > 0.05) & (bad < 0.08)] = -torch.inf
            logits[(bad > 0.08) & (bad < 0.1), 39] = torch.inf
            rows[torch.arange(tree.max_nodes) >= tree.num_nodes[:, None]] = 10**9  # never read
            given = torch.where(rows < 10**9, rows, 0)
            bounds = torch.rand(2, case.batch_size, generator=gen) * 0.2 + 0.01
            path = self.typical(tree, case.token_ids, logits, rows, *bounds)
            probs = logits[given].double().softmax(-1)
            same_path(path, sampler.typical_path(tree, case.token_ids, probs, *bounds.double()))
            accepted += int(path.num_accepted.sum())
        assert accepted > 5

    @pytest.mark.parametrize("nodes", [1, 2, 64, 65, 256])
    def test_boundaries_typical(self, nodes):
        vocab = 11
        for shape, paths in SHAPES.items():
            tree = static(paths(nodes), [nodes, max(1, nodes - 1)], torch.int32)
            logits = torch.randn(nodes, vocab, generator=generator(nodes))
            tokens = torch.randint(0, vocab, (2, nodes), generator=generator(nodes + 1))
            rows = torch.arange(nodes).expand(2, -1)
            bounds = torch.tensor([1e-6, 1e-6]), torch.tensor([1.0, 1.0])
            path = self.check_typical(tree, tokens, logits, rows, *bounds)
            if shape == "chain":
                assert path.num_accepted.tolist() == [nodes - 1, max(0, nodes - 2)]

    def test_distance_to_the_threshold(self, monkeypatch):
        """The threshold at the probability, and a ten-thousandth above and below it."""
        monkeypatch.setattr(kernel, "_SPLIT", 128)
        count, vocab = 12, 1000
        gen = generator(0)
        logits = torch.randn(2 * count, vocab, generator=gen) * torch.rand(2 * count, 1) * 6
        tree = static([[0]], [2] * count)
        tokens = logits[::2].argsort(-1, descending=True)[:, :2]  # [count, 2], column 1 is node 1
        rows = torch.arange(2 * count).view(count, 2)
        p = logits[::2].double().softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        p = p.gather(1, tokens[:, 1:]).squeeze(1)
        for epsilon, delta in ((p, 1e9), (1e9, p * entropy.exp())):
            for factor, accepted in ((1 - 1e-4, 1), (1 + 1e-4, 0)):
                bounds = [
                    (torch.as_tensor(b) * factor).float().expand(count).contiguous()
                    for b in (epsilon, delta)
                ]
                path = self.typical(tree, tokens, logits, rows, *bounds)
                assert path.num_accepted.tolist() == [accepted] * count

    def test_the_comparison_is_strict(self):
        """Two equal logits: p is exactly 0.5, as is the threshold at epsilon 0.5 or delta 1."""
        tree = static([[0]], [2, 2, 2])
        tokens, rows = torch.ones(3, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
        epsilon, delta = torch.tensor([0.5, 0.499, 1.0]), torch.tensor([9.0, 9.0, 0.999])
        path = self.typical(tree, tokens, torch.zeros(1, 2), rows, epsilon, delta)
        assert path.num_accepted.tolist() == [0, 1, 1]

    def test_an_absent_draft_is_rejected(self):
        """Its logit would be the number before the row, a plausible one."""
        tree = static([[0], [0, 0]], [3])
        rows = torch.tensor([[0, 1, 1]])
        bounds = torch.tensor([0.1]), torch.tensor([0.3])
        path = self.check_typical(
            tree, torch.tensor([[0, 1, -1]]), torch.zeros(2, 2), rows, *bounds
        )
        assert path.num_accepted.tolist() == [1]


@IN_INTERPRETER
class TestInterpreted(Cases):
    device = "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device = "cuda"

    @pytest.mark.parametrize("nodes", [16, 64, 256])
    def test_serving_sizes(self, nodes):
        """A batch of 32 and a vocabulary of 32,000; thresholds are far from every probability."""
        case = make_case(nodes, 32, nodes, 3)
        targets = torch.randint(0, 3, case.token_ids.shape, generator=generator(1))
        self.check_walk(case.tree, case.token_ids, targets)
        case = make_case(nodes, 8, nodes, 3)
        logits = torch.randn(nodes, 32_000, generator=generator(2))
        logits[:, :3] += 12  # the drafts are among the probable tokens
        rows = torch.arange(nodes).expand(8, -1)
        bounds = torch.full((8,), 0.2), torch.full((8,), 0.5)
        path = self.check_typical(case.tree, case.token_ids, logits, rows, *bounds)
        assert path.num_accepted.sum() > 0

    def test_graph_capture(self):
        """Captured with other tokens and logits."""
        case = make_case(7, 3, 64, 2)
        tree, tokens = moved(case.tree, "cuda"), case.token_ids.cuda()
        logits, rows = torch.randn(192, 50).cuda(), torch.arange(192, device="cuda").view(3, 64)
        bounds = torch.full((2, 3), 0.02, device="cuda")
        drafts, scores = torch.zeros_like(tokens), torch.zeros_like(logits)

        def step(tokens: Tensor, logits: Tensor) -> tuple[Verdict, Path]:
            verdict = kernel.target_verdict(tree, tokens, tokens)
            return verdict, kernel.typical_path(tree, tokens, logits, rows, *bounds)

        wanted, path = step(tokens, logits)
        step(drafts, scores)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, captured = step(drafts, scores)
        drafts.copy_(tokens)
        scores.copy_(logits)
        graph.replay()
        assert torch.equal(got.output_token_ids, wanted.output_token_ids)
        assert torch.equal(captured.nodes, path.nodes)


@NOT_INTERPRETING
@pytest.mark.parametrize("capability", GENERATIONS)
def test_it_compiles_without_a_gpu(capability):
    case = make_case(5, 3, 200, 2)
    tree, tokens = case.tree, case.token_ids
    with compiling(capability) as compiled:
        kernel.target_verdict(tree, tokens, tokens)
        rows = torch.arange(600).view(3, 200)
        kernel.typical_path(tree, tokens, torch.randn(600, 30000), rows, *torch.rand(2, 3))
    assert len(compiled) == 3
