"""Compaction in one launch against layer by layer in torch, interpreted or on a GPU.

Whole memories are compared, byte for byte: gaps between layers, padding, other requests' slots.
"""

import random

import pytest
import torch

pytest.importorskip("triton")
from support.ahead_of_time import GENERATIONS, compiling
from support.in_torch import compact_layers_torch
from support.interpreter import IN_INTERPRETER, NOT_INTERPRETING
from torch import Tensor

from vllm_medusa.kv import kernel
from vllm_medusa.kv.kernel import LayerCaches

HEADS, SIZE = 3, 5  # channels: not a power of two
# name -> shape in memory of (blocks, block size), the order of its dims in the tensor
LAYOUTS = {
    "heads first": (lambda n, b: (n, HEADS, b, 2 * SIZE), (0, 1, 2, 3)),
    "tokens first": (lambda n, b: (n, b, HEADS, 2 * SIZE), (0, 2, 1, 3)),
    "odd runs": (lambda n, b: (n, HEADS, b, SIZE), (0, 1, 2, 3)),
    "blocks inside": (lambda n, b: (HEADS, n, b, SIZE), (1, 0, 2, 3)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


class Memory:
    """Layers in one buffer of random bytes (including NaN), each offset by some elements."""

    def __init__(self, layout: str, dtype: torch.dtype, layers: int, blocks: int, size: int):
        shape, order = LAYOUTS[layout]
        self.shape, self.order = shape(blocks, size), order
        self.dtype, self.layers = dtype, layers
        self.count = torch.Size(self.shape).numel()
        step = (self.count + 3) * dtype.itemsize
        self.bytes = torch.randint(0, 256, (layers * step,), dtype=torch.uint8)

    def caches(self, memory: Tensor) -> LayerCaches:
        rows = memory.view(self.dtype).view(self.layers, -1)[:, 1 : self.count + 1]
        return LayerCaches.of([r.view(self.shape).permute(self.order) for r in rows])


def random_paths(rng: random.Random, nodes: int, columns: int) -> tuple[list[int], int]:
    """A path through a tree of this many nodes: ascending node indices from the root."""
    depth = rng.randint(0, min(nodes, columns) - 1)
    path = [0, *sorted(rng.sample(range(1, nodes), depth))]
    return path + [path[-1]] * (columns - len(path)), depth


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str

    def check(self, memory: Memory, slots: Tensor, nodes: Tensor, count: Tensor) -> Tensor:
        expected = memory.bytes.clone()
        compact_layers_torch(memory.caches(expected), slots, nodes, count)
        actual = memory.bytes.clone().to(self.device)
        kernel.compact_layers(
            memory.caches(actual), *(t.to(self.device) for t in (slots, nodes, count))
        )
        assert torch.equal(actual.cpu(), expected)
        return expected

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts_and_dtypes(self, layout, dtype):
        """Scattered slots, with others in between; some requests accept nothing."""
        moved = 0
        for seed in range(4):
            torch.manual_seed(seed)
            rng = random.Random(seed)
            batch, nodes, columns, size = rng.randint(1, 4), rng.randint(1, 12), 6, 8
            blocks = batch * nodes // size + 3
            slots = torch.randperm(blocks * size)[: batch * nodes].view(batch, nodes)
            paths = [random_paths(rng, nodes, columns) for _ in range(batch)]
            memory = Memory(layout, dtype, 3, blocks, size)
            after = self.check(
                memory,
                slots,
                torch.tensor([path for path, _ in paths]),
                torch.tensor([depth for _, depth in paths]),
            )
            moved += int((after != memory.bytes).sum())
        assert moved > 0

    @pytest.mark.parametrize("nodes", [1, 2, 64, 65, 256])
    def test_boundaries_and_overlap(self, nodes):
        """Whole chains shifted by one: each slot but two is read and written."""
        torch.manual_seed(nodes)
        columns = nodes
        slots = torch.randperm(272)[:nodes].expand(1, -1)
        path = torch.arange(nodes) + 1
        path[0] = 0
        path = path.clamp(max=nodes - 1)
        count = torch.tensor([max(0, nodes - 2)])
        memory = Memory("tokens first", torch.bfloat16, 2, 17, 16)
        after = self.check(memory, slots, path[None, :columns], count)
        assert torch.equal(after, memory.bytes) == (nodes <= 2)

    def test_slots_in_many_chunks(self, monkeypatch):
        monkeypatch.setattr(kernel, "_CHUNK", 8)
        torch.manual_seed(0)
        for layout in LAYOUTS:
            slots = torch.randperm(64)[:30].view(2, 15)
            nodes = torch.tensor([[0, 3, 4, 9], [0, 1, 2, 14]])
            memory = Memory(layout, torch.float32, 2, 8, 8)
            self.check(memory, slots, nodes, torch.tensor([3, 3]))

    def test_padding_and_rejected_nodes_are_not_followed(self):
        """Slots and nodes without an accepted node may be arbitrary."""
        torch.manual_seed(0)
        slots = torch.tensor([[5, 9, 7, -1, 10**12], [-1, -1, -1, -1, -1]])
        nodes = torch.tensor([[0, 2, 10**9], [-5, -5, -5]])
        memory = Memory("heads first", torch.bfloat16, 2, 3, 8)
        expected = memory.bytes.clone()
        compact_layers_torch(
            memory.caches(expected), slots[:1], torch.tensor([[0, 2, 2]]), torch.tensor([1])
        )
        actual = memory.bytes.clone().to(self.device)
        arguments = slots, nodes, torch.tensor([1, 0])
        kernel.compact_layers(memory.caches(actual), *(t.to(self.device) for t in arguments))
        assert torch.equal(actual.cpu(), expected)


@IN_INTERPRETER
class TestInterpreted(Cases):
    device = "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device = "cuda"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_serving_sizes(self, dtype):
        """Sixteen requests of 64 nodes, eight layers, blocks of 16."""
        torch.manual_seed(0)
        rng = random.Random(0)
        slots = torch.randperm(80 * 16)[: 16 * 64].view(16, 64)
        paths = [random_paths(rng, 64, 6) for _ in range(16)]
        nodes, count = (torch.tensor(values) for values in zip(*paths, strict=True))
        for layout in LAYOUTS:
            memory = Memory(layout, dtype, 8, 80, 16)
            assert not torch.equal(self.check(memory, slots, nodes, count), memory.bytes)

    def test_graph_capture(self):
        """Captured with a path that moves nothing, replayed with one that does."""
        cache = torch.arange(20.0, device="cuda").view(20, 1, 1, 1)
        layers = LayerCaches.of([cache])
        slots = torch.arange(20, device="cuda")[None]
        nodes = torch.tensor([[0, 3, 7]], device="cuda")
        count = torch.zeros(1, dtype=torch.int64, device="cuda")
        kernel.compact_layers(layers, slots, nodes, count)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.compact_layers(layers, slots, nodes, count)
        count.fill_(2)
        graph.replay()
        assert cache.flatten()[:5].tolist() == [0, 3, 7, 3, 4]


@NOT_INTERPRETING
@pytest.mark.parametrize("capability", GENERATIONS)
def test_it_compiles_without_a_gpu(capability):
    slots, nodes, count = torch.arange(64).view(1, 64), torch.tensor([[0, 3]]), torch.tensor([1])
    for layout, dtype in zip(LAYOUTS, DTYPES, strict=True):
        memory = Memory(layout, dtype, 2, 8, 8)
        with compiling(capability) as compiled:
            kernel.compact_layers(memory.caches(memory.bytes), slots, nodes, count)
        assert list(compiled) == ["_compact_kernel"]
