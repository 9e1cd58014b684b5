"""The proposer's kernels against torch, bit for bit; interpreted here, compiled on a GPU."""

import pytest
import torch
from support.ahead_of_time import GENERATIONS, compiling
from support.interpreter import INTERPRETING, run_interpreting
from torch import Tensor

from vllm_medusa import proposer
from vllm_medusa.proposer import dispatch, sharded
from vllm_medusa.proposer.sharded import VocabShard
from vllm_medusa.tree import TokenTree
from vllm_medusa.tree.batch import TreeTensors

NAN, INF = float("nan"), float("inf")
VALUES = torch.tensor([-INF, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 7.0, INF, NAN, -NAN])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TREES = {
    "one node": TokenTree.dense([1]),
    "64 nodes": TokenTree.dense([3, 4, 4]),
    "65 nodes": TokenTree.dense([8, 7]),
    "256 nodes": TokenTree.dense([15, 16]),
    "star": TokenTree.dense([255]),
    "chain": TokenTree.chain(12),
}


def ties(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Few distinct values, so that most decisions are ties."""
    gen = torch.Generator().manual_seed(seed)
    return VALUES[torch.randint(0, len(VALUES), shape, generator=gen)].to(dtype)


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str

    @pytest.fixture(autouse=True)
    def _kernel(self):
        from vllm_medusa.proposer import kernel

        self.kernel = kernel

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("part", [16, 2048])
    def test_candidates_of_a_shard(self, dtype, part, monkeypatch):
        monkeypatch.setattr(self.kernel, "_PARTS", (part,))
        sizes = [(1, 1, 1), (16, 16, 16), (17, 16, 3), (50, 50, 7), (100, 81, 32), (9, 4, 6)]
        for seed, (vocab, num_ids, k) in enumerate([*sizes, (20, 0, 2)]):
            for logits in (
                ties((1, 2, vocab), seed, dtype),
                torch.randn(2, 1, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype),
            ):
                logits[..., num_ids:] = INF  # padding
                shard = VocabShard(1000 * seed, num_ids, 10**6)
                expected = sharded.local_topk(logits, k, shard)
                keys = self.kernel.local_topk(logits.to(self.device), k, shard)
                assert torch.equal(keys.cpu(), expected)

    def test_large_vocabulary(self):
        vocab = 32_001
        logits = torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
        logits[0, 1] = 3.0
        shard = VocabShard(vocab, vocab, 2 * vocab)
        for k in (1, 10, 32):
            keys = self.kernel.local_topk(logits.to(self.device), k, shard)
            assert torch.equal(keys.cpu(), sharded.local_topk(logits, k, shard))

    def test_merge(self):
        for ranks, given, k in ((1, 5, 5), (2, 7, 3), (3, 4, 12), (8, 32, 32)):
            gen = torch.Generator().manual_seed(ranks)
            keys = torch.randperm(ranks * 6 * given, generator=gen).view(ranks, 2, 3, given) - 50
            keys = keys * 2**33
            keys[:, :, 2, given // 2 :] = sharded.NO_CANDIDATE
            merged = self.kernel.merge_topk(keys.to(self.device), k)
            assert torch.equal(merged.cpu(), sharded.merge_topk(keys, k))

    @pytest.mark.parametrize("name", TREES)
    @pytest.mark.parametrize("mapped", [False, True])
    def test_proposals(self, name, mapped, monkeypatch):
        monkeypatch.setattr(self.kernel, "_PARTS", (64,))
        tree = TREES[name]
        cpu, device = (TreeTensors.from_tree(tree, d) for d in ("cpu", self.device))
        logits = ties((2, tree.max_depth + 1, 300), len(name), torch.bfloat16)
        token_map = torch.randperm(1000)[:300] if mapped else None
        expected = proposer.propose(logits, cpu, token_map)
        given = None if token_map is None else token_map.to(self.device)
        moved = logits.to(self.device)
        memory = torch.full((2, tree.num_nodes + 5), -7, device=self.device)
        tokens = self.kernel.propose(moved, device, given, memory[:, : tree.num_nodes])
        assert torch.equal(tokens.cpu(), expected)
        assert (memory[:, tree.num_nodes :] == -7).all()

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
    def test_ranks_together(self, ranks):
        """Each rank runs its kernels; the all-gather is a list."""
        tree = TREES["64 nodes"]
        tensors = TreeTensors.from_tree(tree, self.device)
        logits = ties((2, 3, 101), ranks, torch.float16)
        width = -(-101 // ranks) + 1  # the last shard is short
        padded = torch.full((2, 3, ranks * width), INF, dtype=torch.float16)
        padded[..., :101] = logits
        shards = [
            (
                padded[..., r * width : (r + 1) * width].to(self.device),
                VocabShard.of_rank(r, width, 101),
            )
            for r in range(ranks)
        ]
        sent = torch.stack([self.kernel.local_topk(own, 4, shard) for own, shard in shards])
        expected = proposer.propose(logits, TreeTensors.from_tree(tree))
        for rank, (own, shard) in enumerate(shards):

            def all_gather(keys, rank=rank):
                assert torch.equal(keys, sent[rank])
                return sent

            tokens = self.kernel.propose_sharded(own, tensors, shard, all_gather)
            assert torch.equal(tokens.cpu(), expected)

    def test_dispatch_passes_all_arguments(self):
        tree, known = TokenTree.dense([3, 2]), torch.tensor([4, 9, 2, 7, 5, 11])
        logits = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(5))
        expected = proposer.propose(logits, TreeTensors.from_tree(tree), known)
        there = TreeTensors.from_tree(tree, self.device)
        given, mapped = logits.to(self.device), known.to(self.device)
        assert torch.equal(dispatch.propose(given, there, mapped).cpu(), expected)
        whole = VocabShard.of_rank(0, 6, 6)
        drafts = dispatch.propose_sharded(given, there, whole, lambda keys: keys[None], mapped)
        assert torch.equal(drafts.cpu(), expected)

    def test_a_prefix_of_the_tree(self):
        tree = TreeTensors.from_tree(TREES["65 nodes"])
        logits = ties((2, 3, 40), 1, torch.float32)
        moved = TreeTensors.from_tree(TREES["65 nodes"], self.device).prefix(9)
        tokens = self.kernel.propose(logits.to(self.device), moved)  # without an output buffer
        assert torch.equal(tokens.cpu(), proposer.propose(logits, tree.prefix(9)))

    def test_a_wrong_first_id_is_detected(self):
        """Negative control: ids and the order of ties depend on it."""
        logits = torch.zeros(1, 1, 40, device=self.device)
        keys = torch.stack(
            [self.kernel.local_topk(logits, 2, VocabShard(first, 40, 80)) for first in (0, 40)]
        )
        merged = sharded.token_ids(self.kernel.merge_topk(keys, 2))
        assert merged.tolist() == [[[0, 1]]]
        wrong = sharded.token_ids(self.kernel.merge_topk(keys[1:], 2))
        assert wrong.tolist() == [[[40, 41]]]


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process that interprets Triton, see below")
class TestInterpreted(Cases):
    device = "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device = "cuda"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("vocab", [32_000, 128_256])
    def test_serving_sizes(self, vocab, dtype):
        """A batch of 32, whole and from shards; half types are full of ties."""
        tree = TokenTree.dense((5, 4, 3)).prefix(64)
        generator = torch.Generator().manual_seed(4)
        logits = (torch.randn(32, 4, vocab, generator=generator) * 3).to(dtype)
        expected = proposer.propose(logits, TreeTensors.from_tree(tree))
        there, logits = TreeTensors.from_tree(tree, self.device), logits.to(self.device)
        assert torch.equal(self.kernel.propose(logits, there).cpu(), expected)
        for ranks in (4, 8):
            keys = []
            for rank in range(ranks):
                shard = VocabShard.of_rank(rank, -(-vocab // ranks), vocab)
                own = logits[:, : tree.max_depth, shard.first_id : shard.first_id + shard.num_ids]
                keys.append(self.kernel.local_topk(own, max(tree.head_widths), shard))
            tokens = self.kernel.fill_tree(torch.stack(keys), there)
            assert torch.equal(tokens.cpu(), expected)

    def test_graph_capture(self):
        """Captured with other logits, into a given buffer."""
        tree = TreeTensors.from_tree(TREES["64 nodes"], "cuda")
        logits = ties((2, 3, 30_000), 0, torch.bfloat16).cuda()
        expected = self.kernel.propose(logits, tree)
        captured, out = torch.zeros_like(logits), torch.full_like(expected, -7)
        self.kernel.propose(captured, tree, None, out)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.kernel.propose(captured, tree, None, out)
        captured.copy_(logits)
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.skipif(INTERPRETING, reason="this is the process that interprets Triton")
def test_in_a_process_that_interprets():
    run_interpreting(__file__, "TestInterpreted")


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's process compiles nothing")
@pytest.mark.parametrize("capability", GENERATIONS)
def test_it_compiles_without_a_gpu(capability):
    pytest.importorskip("triton")
    from vllm_medusa.proposer import kernel

    tree = TreeTensors.from_tree(TREES["64 nodes"])
    for dtype in DTYPES:
        logits = torch.zeros(2, 3, 30_000, dtype=dtype)
        with compiling(capability) as compiled:
            kernel.propose(logits, tree)
            kernel.propose(logits, tree, torch.arange(30_000))
            kernel.local_topk(logits, 4, VocabShard(0, 20_000, 30_000))
        assert len(compiled) == 3
