"""The search against its twin in torch, bit for bit; interpreted here and compiled on a GPU."""

import pytest
import torch
from support.ahead_of_time import GENERATIONS, compiling
from support.interpreter import INTERPRETING, run_interpreting
from torch import Tensor

from vllm_medusa.lookup import on_device
from vllm_medusa.lookup.search import LONGEST

OUTSIDE = -7  # what lies behind a text


def table(texts: list[Tensor], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts as rows of a longer table, in the order of their slots: table, slots, lengths."""
    slots = torch.randperm(len(texts) + 3)[: len(texts)]
    rows = torch.full((len(texts) + 3, width + 5), OUTSIDE, dtype=torch.int32)
    for slot, text in zip(slots.tolist(), texts, strict=True):
        rows[slot, : len(text)] = text
    return rows[:, :width], slots, torch.tensor([len(text) for text in texts])


class Cases:
    """What both the interpreter and a GPU must pass."""

    device: str

    @pytest.fixture(autouse=True)
    def _kernel(self):
        from vllm_medusa.lookup import kernel

        self.kernel = kernel

    def check(self, texts: list[Tensor], width: int, count: int) -> Tensor:
        given = table(texts, width)
        expected = on_device.continuations_torch(*given, count)
        moved = [each.to(self.device) for each in given]
        for function in (self.kernel.continuations, on_device.continuations):
            matched, found = function(*moved, count)
            assert matched.tolist() == expected[0].tolist()
            assert found.tolist() == expected[1].tolist()
        return matched

    @pytest.mark.parametrize("block", [16, 64, 4096])
    @pytest.mark.parametrize("vocab", [1, 2, 5, 1000])
    def test_random_texts(self, monkeypatch, block, vocab):
        """Of every length, some that end as they went on before, at the edges of blocks too."""
        monkeypatch.setattr(self.kernel, "_BLOCK", block)
        torch.manual_seed(vocab)
        texts = [torch.randint(0, vocab, (n,)) for n in (0, 1, 2, 3, 15, 16, 17, 33, 64, 65, 150)]
        for length, start, back in ((40, 0, 5), (130, 62, 3), (150, 63, LONGEST), (150, 10, 60)):
            text = torch.randint(0, vocab, (length,))
            text[length - back :] = text[start : start + back].clone()
            texts.append(text)
        matched = self.check(texts, 150, 20)
        assert matched.max() == LONGEST and (vocab < 3 or 2 <= matched[11] < LONGEST)

    def test_a_table_as_wide_as_its_only_text(self):
        for width in (1, 2, 40):
            self.check([torch.arange(width) % 4], width, 7)

    def test_a_wrong_slot_is_seen(self):
        """Negative control."""
        rows, slots, lengths = table([torch.tensor([1, 2, 3, 1, 2]), torch.arange(5)], 5)
        moved = [each.to(self.device) for each in (rows, slots.flip(0), lengths)]
        assert self.kernel.continuations(*moved, 3)[0].tolist() == [0, 2]


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process whose Triton interprets, see below")
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


@pytest.mark.skipif(INTERPRETING, reason="this is the process whose Triton interprets")
def test_in_a_process_that_interprets():
    run_interpreting(__file__, "TestInterpreted")


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's process compiles nothing")
@pytest.mark.parametrize("capability", GENERATIONS)
def test_it_compiles_without_a_gpu(capability):
    pytest.importorskip("triton")
    from vllm_medusa.lookup import kernel

    with compiling(capability) as compiled:
        kernel.continuations(*table([torch.arange(9)], 20), 63)
    assert list(compiled) == ["search"]
