"""All kernels together decode the same tokens as plain decoding: small fp32 models, with graphs.

A plain loop, `benchmarks.gpu.decoder`, whose steps use all kernels. Heads are fitted
to the plain text, so that paths are accepted, and the node order makes every accepted
path move. Caches are NaN until written. Without the compaction, the text must change.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.interpreter import IN_INTERPRETER
from torch import Tensor

from benchmarks.gpu.clock import capture
from benchmarks.gpu.decoder import Decoder, HeadLogits, plant, step_tree
from benchmarks.gpu.model import SMALL, TINY, ModelShape, Target
from vllm_medusa.sampler import greedy_verdict
from vllm_medusa.tree.batch import TreeBatch, TreeTensors
from vllm_medusa.tree.topology import TokenTree

PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [8, 3, 9], [5, 5, 1, 0, 2, 10, 4, 4, 6, 1, 3, 2, 8, 7, 9, 0, 1])
TOLERANCE = 1e-3  # for fp32 logits around 1: products of other shapes sum in another order


class Decoded(NamedTuple):
    """Results of a run: the texts, and the hidden states [B * N, H] of each step."""

    texts: list[list[int]]
    hidden: list[Tensor]


class Uncompacted(Decoder):
    """Does not move keys and values: wrong, as a negative control."""

    def verify(self) -> None:
        from vllm_medusa.sampler.launch import target_verdict

        target_verdict(self.trees, self.tokens, self.chosen, out=self.verdict)


def fitted_heads(hidden: Tensor, texts: list[list[int]], vocab: int) -> HeadLogits:
    """Three heads fitted to these texts: least squares from the hidden states that produced them.

    ``hidden`` is [T, B, H], of the position that produced token t of each text.
    """
    count, length = 3, len(hidden) - 3
    states = hidden[:length].flatten(0, 1).double().cpu()  # [S, H]
    tokens = torch.tensor(texts).T  # [T, B]
    future = torch.stack([tokens[h + 1 : h + 1 + length] for h in range(count)])  # [K, T, B]
    wanted = torch.nn.functional.one_hot(future.flatten(1), vocab).double()  # [K, S, V]
    gram = states.T @ states + 1e-3 * torch.eye(states.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(gram, states.T @ wanted).to(hidden)  # [K, H, V]
    return lambda states: torch.einsum("bh,khv->bkv", states, weight)


def a_tree(nodes: int) -> TokenTree:
    """Depth 3, with the best choices last on each level, so that accepted paths have to move."""
    paths = TokenTree.dense((4, 4, 3)).prefix(nodes).paths
    return TokenTree(tuple(sorted(paths, key=lambda path: (len(path), [-rank for rank in path]))))


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str
    shape: ModelShape
    tokens: int
    prompts: int

    def target(self) -> Target:
        return Target(self.shape, torch.float32, self.device, positions=2048)

    def inputs(self) -> list[list[int]]:
        return [[t % self.shape.vocab for t in prompt] for prompt in PROMPTS[: self.prompts]]

    def decode(self, kind, target, tree=None, heads=None) -> Decoded:
        """At least ``tokens`` tokens per prompt."""
        inputs = self.inputs()
        maximum = self.tokens * (1 if tree is None else tree.max_depth + 1)
        capacity = max(map(len, inputs)) + maximum + (1 if tree is None else tree.num_nodes)
        decoder = kind(target, [1] * len(inputs), capacity, tree, heads)
        step = capture(decoder.step) if self.device == "cuda" else decoder.step
        for cache in decoder.caches:
            cache.fill_(float("nan"))
        for request, prompt in enumerate(inputs):
            decoder.prefill(request, prompt)
        decoded = Decoded([[] for _ in inputs], [])
        while min(map(len, decoded.texts)) < self.tokens:
            step()
            for text, new in zip(decoded.texts, decoder.emitted(), strict=True):
                text += new
            decoded.hidden.append(decoder.hidden.clone())
        return decoded

    def check_text(self, nodes: int) -> None:
        target, tree = self.target(), a_tree(nodes)
        plain = self.decode(Decoder, target)
        heads = fitted_heads(torch.stack(plain.hidden), plain.texts, self.shape.vocab)
        found = self.decode(Decoder, target, tree, heads)
        for text, right in zip(found.texts, plain.texts, strict=True):
            assert text[: self.tokens] == right[: self.tokens]
        assert sum(map(len, found.texts)) / len(found.hidden) / len(found.texts) > 2
        wrong = self.decode(Uncompacted, target, tree, heads)  # negative control
        pairs = zip(wrong.texts, plain.texts, strict=True)
        assert any(a[: self.tokens] != b[: self.tokens] for a, b in pairs)

    def check_logits(self, nodes: int) -> None:
        """Logits at every node against those after its path as plain text."""
        target, tree = self.target(), a_tree(nodes)
        hidden = torch.randn(4, 1, self.shape.hidden).to(self.device)
        heads = fitted_heads(hidden, [[0, 1, 2, 3]], self.shape.vocab)  # of any kind
        inputs = self.inputs()
        decoder = Decoder(target, [1] * len(inputs), 64 + nodes, tree, heads)
        for request, prompt in enumerate(inputs):
            decoder.prefill(request, prompt)
        decoder.score()
        scored = decoder.logits.view(len(inputs), nodes, -1)
        for request, prompt in enumerate(inputs[: 1 if self.device == "cpu" else None]):
            plain = Decoder(target, [1], 64 + nodes)
            row = decoder.tokens[request].tolist()
            for node in range(nodes):
                path, at = [], node
                while at > 0:
                    path.append(row[at])
                    at = tree.parents[at]
                states = plain.prefill(0, [*prompt, *reversed(path), 0])
                off = (target.logits(states[-1:])[0] - scored[request, node]).abs().max()
                assert off < TOLERANCE


@IN_INTERPRETER
class TestInterpreted(Cases):
    device, shape, tokens, prompts = "cpu", TINY, 8, 2

    def test_tree_decoding_equals_plain_decoding(self):
        self.check_text(9)

    def test_logits_at_the_nodes(self):
        self.check_logits(9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device, shape, tokens, prompts = "cuda", SMALL, 120, 3

    @pytest.mark.parametrize("nodes", [16, 64])
    def test_tree_decoding_equals_plain_decoding(self, nodes: int):
        self.check_text(nodes)

    def test_logits_at_the_nodes(self):
        self.check_logits(16)


@pytest.mark.parametrize("nodes", [16, 32, 64])
def test_planted_steps_accept_a_path_that_moves(nodes):
    tree = step_tree(nodes)
    assert (tree.num_nodes, tree.max_depth) == (nodes, 5)
    tensors = TreeTensors.from_tree(tree)
    tokens, targets = plant(tensors, 2, 100)
    batch = TreeBatch.from_static(tensors, torch.full((2,), nodes))
    assert greedy_verdict(batch, tokens, targets).path.num_accepted.tolist() == [5, 5]
