"""The kernels against their twins in C++, bit for bit; interpreted here, compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from support.ahead_of_time import GENERATIONS, compiling
from support.interpreter import IN_INTERPRETER, NOT_INTERPRETING
from support.random_trees import random_parents
from torch import Tensor

from vllm_medusa.lookup import kernel, search
from vllm_medusa.lookup.search import MAX_MATCH
from vllm_medusa.tree.draft_trees import FROM_BOTH, DraftTrees

OUTSIDE = -7  # padding after a text


def table(texts: list[Tensor], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts as rows of a longer table, in slot order: table, slots, lengths."""
    slots = torch.randperm(len(texts) + 3)[: len(texts)]
    rows = torch.full((len(texts) + 3, width + 5), OUTSIDE, dtype=torch.int32)
    for slot, text in zip(slots.tolist(), texts, strict=True):
        rows[slot, : len(text)] = text
    return rows[:, :width], slots, torch.tensor([len(text) for text in texts])


def trees_and_chains(
    seed: int, batch: int, nodes: int, size: int
) -> tuple[DraftTrees, Tensor, Tensor]:
    """Few tokens and values, so that chains follow paths and survivals tie; some padding."""
    gen = torch.Generator().manual_seed(seed)
    parents = torch.tensor([random_parents(nodes, gen, "deep") for _ in range(batch)])
    steps = torch.tensor([0.0, 0.0, -0.25, -1.0])
    values = steps[torch.randint(0, 4, (batch, nodes), generator=gen)].cumsum(1)
    counts = torch.randint(1, nodes + 1, (batch, 1), generator=gen)
    values = values.masked_fill(torch.arange(nodes) >= counts, -torch.inf)
    values[:, 0] = 0.0
    surer = steps[torch.randint(0, 4, (batch, size), generator=gen)].cumsum(1)
    ends = torch.randint(0, size + 1, (batch, 1), generator=gen)
    surer = surer.masked_fill(torch.arange(size) >= ends, -torch.inf)
    tokens, chain = (torch.randint(0, 3, (batch, n), generator=gen) for n in (nodes, size))
    chain = chain.masked_fill(torch.arange(size) >= ends, -1)
    return DraftTrees(tokens, parents, values, torch.zeros_like(tokens)), chain, surer


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str

    def check(self, texts: list[Tensor], width: int, count: int) -> Tensor:
        given = table(texts, width)
        expected = search.continuations(*(each.numpy() for each in given), count)
        moved = [each.to(self.device) for each in given]
        matched, *parts = search.continuations(*moved, count)
        assert matched.tolist() == expected[0].tolist()
        found = expected[0] > 0  # otherwise tokens and agreement are arbitrary
        for part, wanted in zip(parts, expected[1:], strict=True):
            assert part.cpu()[found].tolist() == wanted[found].tolist()
        return matched

    @pytest.mark.parametrize("block", [16, 64, 4096])
    @pytest.mark.parametrize("vocab", [1, 2, 5, 1000])
    def test_random_texts(self, monkeypatch, block, vocab):
        """Of every length, some whose end repeats earlier text, also at block edges."""
        monkeypatch.setattr(kernel, "_BLOCK", block)
        for module in (kernel, search):
            monkeypatch.setattr(module, "WINDOW", 100)
        torch.manual_seed(vocab)
        texts = [torch.randint(0, vocab, (n,)) for n in (1, 2, 3, 15, 16, 17, 33, 64, 65, 150)]
        for length, start, back in ((40, 0, 5), (130, 62, 3), (150, 63, MAX_MATCH), (150, 10, 60)):
            text = torch.randint(0, vocab, (length,))
            text[length - back :] = text[start : start + back].clone()
            texts.append(text)
        matched = self.check(texts, 150, 20)
        assert matched.max() == MAX_MATCH and (vocab < 3 or 2 <= matched[11] < MAX_MATCH)

    def test_a_table_as_wide_as_its_only_text(self):
        for width in (1, 2, 40):
            self.check([torch.arange(width) % 4], width, 7)

    def test_a_wrong_slot_is_detected(self):
        """Negative control."""
        rows, slots, lengths = table([torch.tensor([1, 2, 3, 1, 2]), torch.arange(5)], 5)
        moved = [each.to(self.device) for each in (rows, slots.flip(0), lengths)]
        assert kernel.continuations(*moved, 3)[0].tolist() == [0, 2]

    def joined(self, trees: DraftTrees, chain: Tensor, surer: Tensor, levels: int) -> DraftTrees:
        moved = DraftTrees(*(each.to(self.device) for each in vars(trees).values()))
        return search.join(moved, chain.to(self.device), surer.to(self.device), levels)

    @pytest.mark.parametrize("nodes", [1, 2, 10, 64, 256])
    @pytest.mark.parametrize("size", [1, 9, 63, 255])
    def test_trees_and_chains(self, nodes, size):
        shared = 0
        for seed in range(4):
            trees, chain, surer = trees_and_chains(seed, 3, nodes, size)
            expected = search.join(trees, chain.numpy(), surer.numpy(), 5)
            found = self.joined(trees, chain, surer, 5)
            for name, part in vars(expected).items():
                assert torch.equal(getattr(found, name).cpu(), part), name
            shared += int((expected.source == FROM_BOTH).sum())
        assert shared or nodes < 10

    def test_another_token_of_a_chain_is_detected(self):
        """Negative control."""
        trees, chain, surer = trees_and_chains(0, 3, 10, 9)
        found = self.joined(trees, chain, surer, 5)
        wrong = self.joined(trees, (chain + 1) % 3, surer, 5)
        assert not torch.equal(found.token_ids, wrong.token_ids)


@IN_INTERPRETER
class TestInterpreted(Cases):
    device = "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device = "cuda"

    @pytest.mark.parametrize("vocab", [3, 100, 128_000])
    def test_serving_sizes(self, vocab):
        """Sixty-four texts of up to 32,000 tokens, and one that repeats a single token."""
        torch.manual_seed(0)
        texts = [torch.randint(0, vocab, (500 * n,)) for n in range(1, 65)]
        self.check([*texts, torch.zeros(32_000, dtype=torch.int64)], 32_000, 63)


@NOT_INTERPRETING
@pytest.mark.parametrize("capability", GENERATIONS)
def test_it_compiles_without_a_gpu(capability):
    with compiling(capability) as compiled:
        kernel.continuations(*table([torch.arange(9)], 20), 63)
        for nodes in (64, 256):
            trees, *chain = trees_and_chains(0, 2, nodes, 63)
            kernel.join(trees, *chain, 5)
    assert set(compiled) == {"search_kernel", "join_kernel"}
