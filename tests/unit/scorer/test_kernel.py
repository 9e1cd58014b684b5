"""The Triton kernel against the fp64 reference, interpreted here and compiled on a GPU.

Every case is poisoned (`support.paged_batches`), so forbidden reads give NaN.

Tolerances. fp32: another summation order, 1e-5 is 80 ulp of outputs near 1. Half types: weights are
rounded before the second product, each by u/2 (u = 2**-10 for fp16, 2**-7 for bf16), and the
output is rounded again, so the error is below u * max|value| of about 4. The interpreter
truncates to bf16 instead of rounding, which doubles it. fp8 is exactly representable in all.
"""

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from support.ahead_of_time import compiling
from support.in_torch import paged_tree_attention_torch
from support.interpreter import IN_INTERPRETER, NOT_INTERPRETING
from support.paged_batches import PADDING, Case, Request, chunk, decode, make_case, tree
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_medusa import kernels
from vllm_medusa.scorer import launch, tiles
from vllm_medusa.scorer.paged import FP8_DTYPES

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-5, F16: 4 * 2**-10, BF16: 8 * 2**-7}
MIXED = [tree(9, 37), chunk(5, 9), PADDING, decode(33), tree(1, 0), tree(13, 16), chunk(18)]
MIXED.append(PADDING)


def check(case: Case, by_torch: bool = False) -> torch.Tensor:
    """The output, which is right by the reference, or by the twin in torch."""
    assert kernels.uses_kernel(case.query.device.type)
    out = case.run()
    error = (case.difference_to_torch if by_torch else case.difference)(out)
    assert error < TOLERANCE[case.query.dtype]
    return out


def stack_bytes(cubin: bytes, tmp_path: Path) -> int:
    """Register spills per thread."""
    import triton

    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.check_output([tool, "--dump-resource-usage", file], text=True)
    found = re.search(r"STACK:(\d+)", usage)
    assert found, usage
    return int(found[1])


class Cases:
    """Cases for both the interpreter and a GPU."""

    device: str

    def make(self, requests, **options) -> Case:
        return make_case(requests, device=self.device, **options)

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize(
        "options",
        [
            {"spare_rows": 3},
            {"heads": (6, 6), "sinks": True},
            {"heads": (8, 1), "softcap": 2.0, "layout": "tokens first"},
            {"heads": (6, 2), "window": 5, "slack": 40, "block": 32},
            {"heads": (14, 2), "window": 20, "sinks": True, "softcap": 3.0, "nodes": 21},
            {"layout": "channels first", "static": True, "nodes": 14},
        ],
        ids=str,
    )
    def test_mixed_batches(self, options, splits):
        check(self.make(MIXED, splits=splits, **options))

    @pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
    def test_head_sizes(self, dim):
        for dtype in TOLERANCE:
            case = self.make([tree(5, 20), decode(17)], dim=dim, dtype=dtype, splits=2)
            check(case)

    @pytest.mark.parametrize("dtype", [F16, BF16, F32])
    @pytest.mark.parametrize("kv_dtype", [None, *FP8_DTYPES])
    def test_dtypes(self, dtype, kv_dtype):
        options = {"dtype": dtype, "kv_dtype": kv_dtype, "sinks": True, "softcap": 5.0}
        for window, splits in ((12, 1), (None, 4)):
            check(self.make(MIXED, heads=(2, 1), window=window, splits=splits, **options))

    @pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 128, 129, 256])
    @pytest.mark.parametrize("context", [0, 17])
    def test_boundaries_of_words(self, nodes, context):
        check(self.make([tree(nodes, context)], heads=(2, 2), splits=1 + nodes % 2))

    @pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 31, 32, 63, 64, 65])
    def test_boundaries_of_blocks_and_tiles(self, context):
        for window in (None, 3):
            case = self.make([tree(3, context), tree(16, context), decode(context)], window=window)
            check(case)

    @pytest.mark.parametrize("splits", [2, 5, 16, 64])
    def test_empty_and_uneven_parts(self, splits):
        requests = [tree(6, 150), decode(0), tree(3, 63), PADDING, chunk(34, 1)]
        check(self.make(requests, heads=(1, 1), splits=splits, sinks=splits == 5))

    @pytest.mark.parametrize("window", [1, 2, 3, 7, 64])
    @pytest.mark.parametrize("shape", ["chain", "star", "pairs"])
    def test_windows_smaller_than_the_tree(self, window, shape):
        requests = [tree(40, 70, shape), tree(9, 0, shape), chunk(50, 3)]
        check(self.make(requests, heads=(1, 1), window=window, splits=1 + window % 2))

    def test_rows_of_a_request_in_many_tiles(self):
        """70 nodes of 7 heads take several tiles, as do 90 rows of a chunk."""
        for dtype in (F32, F16):
            check(self.make([tree(70, 40), chunk(90, 80)], heads=(7, 1), dtype=dtype))

    def test_both_ways_of_finding_a_request(self):
        """Loose bounds make the kernel search; tight ones give every request its tiles."""
        for slack in (0, 500):
            check(self.make([tree(16, 30)] * 5, heads=(2, 2), slack=slack))
            check(self.make([PADDING, tree(40, 3), PADDING, decode(9), PADDING], slack=slack))
        requests = [decode(b % 20) if b % 3 else PADDING for b in range(140)]
        check(self.make([*requests, tree(3, 5)], heads=(1, 1), slack=500))

    def test_a_dummy_batch_reads_nothing(self):
        case = self.make([tree(6, 0), chunk(4, 0), PADDING], splits=2)
        lens = torch.tensor([1, 1, 0], dtype=torch.int32, device=self.device)
        case = case.with_batch(seq_lens=lens)
        out = check(case, by_torch=True)
        assert (out[6:9] == 0).all()

    @pytest.mark.parametrize("splits", [1, 3])
    @pytest.mark.parametrize("window", [None, 6])
    def test_first_rows_without_queries(self, splits, window):
        """Rows whose keys are cached need no query; the other rows are unchanged."""
        requests = [tree(70, 40), PADDING, tree(66, 0), chunk(67, 9)]
        case = self.make(requests, heads=(4, 2), window=window, splits=splits)
        expected, before = case.expected(), 65  # in the mask's second word
        rows = torch.tensor([*range(65, 70), 70 + 65, *range(136 + 65, 136 + 67)])
        cu = torch.tensor([0, 5, 5, 6, 8], dtype=torch.int32, device=self.device)
        part = replace(case, query=case.query[rows.to(self.device)]).with_batch(
            cu_query_lens=cu, rows_before=before, max_query_len=5
        )
        out = part.run()
        assert (out.double() - expected[rows.to(self.device)]).abs().amax() < TOLERANCE[F32]
        out = part.run(paged_tree_attention_torch, torch.float64)
        assert (out - expected[rows.to(self.device)]).abs().amax() < 1e-12

    def test_empty_batch(self):
        out = self.make([PADDING, PADDING], spare_rows=4).run()
        assert out.isnan().all()
        self.make([PADDING], nodes=3).run()

    def test_scales_may_be_left_out(self):
        case = self.make([tree(6, 20)], kv_dtype=FP8_DTYPES[0])
        case = replace(case, options={**case.options, "k_scale": None, "v_scale": None})
        check(case)

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize(
        "wrong",
        ["mask off", "index for depth", "one bit", "no tree", "lengths", "blocks", "rows", "swap"],
    )
    def test_wrong_metadata_is_detected(self, wrong, window):
        """Negative controls: the reference reads none of it, so wrong fields must be detected."""
        case = self.make([tree(12, 40), tree(12, 30)], heads=(2, 1), window=window)
        check(case)
        batch = case.batch
        bits, depths = batch.ancestor_bits.clone(), batch.depths
        changes = {
            "mask off": {"ancestor_bits": torch.full_like(bits, -1)},
            "index for depth": {"depths": torch.arange(12, device=self.device).expand(2, -1)},
            "one bit": {"ancestor_bits": bits},
            "no tree": {"is_tree": torch.zeros_like(batch.is_tree)},
            "lengths": {"seq_lens": batch.seq_lens - 1},
            "blocks": {"block_table": batch.block_table.flip(0)},
            "rows": {"cu_query_lens": batch.cu_query_lens.clone()},
            "swap": {"ancestor_bits": bits.flip(0), "depths": depths.flip(0)},
        }
        bits[1, 11, 0] ^= 1 << 11  # the last node no longer sees itself
        changes["rows"]["cu_query_lens"][1] -= 1
        out = case.with_batch(**changes[wrong]).run()
        error = (out.double() - case.expected()).abs().amax()
        if wrong == "index for depth" and window is None:
            assert error < TOLERANCE[F32]  # depths only matter with windows
        else:
            assert not error < 1e-2  # also false for NaN

    @pytest.mark.parametrize("seed", range(20))
    def test_random_batches(self, seed):
        draw = random.Random(seed)

        def request() -> Request:
            shape = draw.choice(("random", "chain", "star", "pairs"))
            kinds = (
                lambda: tree(draw.randint(1, 70), draw.randint(0, 100), shape),
                lambda: chunk(draw.randint(1, 40), draw.randint(0, 50)),
                lambda: decode(draw.randint(0, 120)),
                lambda: PADDING,
            )
            return draw.choice(kinds)()

        case = self.make(
            [*(request() for _ in range(draw.randint(1, 4))), decode(5)],
            heads=draw.choice(((2, 2), (4, 2), (6, 2), (5, 1))),
            dim=draw.choice((64, 80)),
            block=draw.choice((16, 32)),
            dtype=draw.choice(tuple(TOLERANCE)),
            kv_dtype=draw.choice((None, *FP8_DTYPES)),
            window=draw.choice((None, 1, 4, 16, 33)),
            softcap=draw.choice((0.0, 2.0)),
            sinks=draw.random() < 0.5,
            splits=draw.choice((1, 2, 7)),
            slack=draw.choice((0, 100)),
            spare_rows=draw.randint(0, 2),
            layout=draw.choice(("heads first", "tokens first")),
            seed=seed,
        )
        check(case)


@IN_INTERPRETER
class TestInterpreted(Cases):
    device = "cpu"

    @pytest.mark.parametrize(
        ("request_", "window", "unmasked"),
        [
            (chunk(70, 40), None, 2 + 3 + 4 + 5 + 6),  # everything before a tile of rows
            (chunk(70), None, 0 + 1 + 2 + 3 + 4),
            (tree(70, 40), None, 5 * 2),
            (chunk(70, 40), 50, 0),
        ],
    )
    def test_tiles_without_a_mask(self, monkeypatch, request_, window, unmasked):
        """Only these look up blocks for all of their keys."""
        from triton.runtime.interpreter import InterpreterBuilder

        small = tiles.Tiles(16, 16, 4, 1)
        monkeypatch.setattr(launch, "tile_sizes", lambda *_: small)
        load, loaded = InterpreterBuilder.create_load, []

        def create_load(self, pointers, *options):
            loaded.append(pointers.data.size)
            return load(self, pointers, *options)

        monkeypatch.setattr(InterpreterBuilder, "create_load", create_load)
        check(self.make([request_], heads=(1, 1), window=window))
        assert loaded.count(16) == unmasked

    def test_control_integer_overflows_are_detected(self):
        """The interpreter checks every sum and product of kernels."""
        import triton

        @triton.jit
        def twice(number):
            number + number

        twice[1,](2**30 - 1)
        with pytest.raises(triton.runtime.errors.InterpreterError, match="add of int32"):
            twice[1,](2**30)

    def test_small_tiles_give_the_same_result(self, monkeypatch):
        """Sixteen rows and sixteen keys per tile: every loop and every edge is covered."""
        small = tiles.Tiles(16, 16, 4, 1)
        monkeypatch.setattr(launch, "tile_sizes", lambda *_: small)
        for window, splits in ((None, 1), (6, 3)):
            check(self.make(MIXED, window=window, splits=splits, heads=(2, 1)))
            check(self.make([tree(70, 40)], heads=(1, 1), window=window, splits=splits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu(Cases):
    device = "cuda"

    def make(self, requests, **options) -> Case:
        if options.get("kv_dtype") == FP8_DTYPES[0] and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("e4m3 needs a GPU of capability 8.9")
        return super().make(requests, **options)

    @pytest.mark.parametrize("heads", [(32, 32), (32, 8), (8, 1), (64, 8), (14, 2)], ids=str)
    def test_serving_sizes(self, heads):
        """Long contexts, tiles as in serving, the max number of parts."""
        requests = [tree(64, 6000), chunk(150, 700), decode(511), tree(16, 0), PADDING]
        for dtype in (BF16, F16):
            for splits in (1, 16, 64):
                options = {"heads": heads, "dim": 128, "dtype": dtype, "splits": splits}
                check(self.make(requests, spare_rows=3, slack=500 * (splits == 16), **options))

    @pytest.mark.parametrize("kv_dtype", [None, FP8_DTYPES[0]])
    @pytest.mark.parametrize("rows", [64, 128])
    def test_many_launches_give_the_same_bits(self, monkeypatch, rows, kv_dtype):
        """No product or prefetch reads what another one writes (triton#9433)."""
        requests = [tree(64, 1400 + 10 * n) for n in range(8)]
        heads = (rows // 8, 8)  # rows per key head for 64 nodes
        case = self.make(requests, heads=heads, dim=128, dtype=BF16, kv_dtype=kv_dtype, splits=4)
        chosen, real = [], launch.tile_sizes

        def with_stages(stages):
            def tile_sizes(*shape):
                chosen.append(replace(real(*shape), **({"num_stages": stages} if stages else {})))
                return chosen[-1]

            monkeypatch.setattr(launch, "tile_sizes", tile_sizes)

        with_stages(1)
        expected = case.run()
        assert chosen[-1].block_m == rows
        for stages in (None, 3, 5):
            with_stages(stages)
            off = torch.zeros((), dtype=torch.int64, device=self.device)
            for _ in range(1000 if stages is None else 100):
                off += (case.run() != expected).sum()
            assert off.item() == 0, f"{chosen[-1]}"

    def test_graph_capture_replays_with_new_lengths(self):
        """Captured with dummy lengths, replayed with real ones: the host must not read them."""
        case = self.make([tree(16, 90), tree(16, 200), PADDING], splits=4, dtype=F16)
        expected = case.run()
        batch = case.batch
        seq_lens = batch.seq_lens.clone()
        out = torch.zeros_like(case.query)

        def step():
            given = case.query, case.key_cache, case.value_cache, batch, case.scale
            launch.paged_tree_attention(*given, out=out, **case.options)

        step()
        batch.seq_lens.fill_(1)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_allocated()
        with torch.cuda.graph(graph):
            step()
        assert torch.cuda.memory_allocated() == before
        batch.seq_lens.copy_(seq_lens)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[: case.num_rows], expected[: case.num_rows])


def test_splits_follow_the_device(monkeypatch):
    def splits(batch_size, heads, kv_heads, nodes):
        shape = (batch_size, heads, kv_heads, 128, nodes, 32768)
        return launch.choose_splits(*shape, F16, F16, torch.device("cpu"))

    assert splits(1, 32, 32, 64) == 1  # a CPU is one multiprocessor
    limits = tiles.DeviceLimits(132, 227 * 1024, async_mma=True)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)
    assert splits(1, 32, 32, 64) == 8  # 32 programs, one per head; two fit on a multiprocessor
    assert splits(1, 64, 8, 64) == 4  # 32 again: 512 folded rows are four tiles
    assert splits(1, 64, 8, 1) == 32
    assert splits(32, 32, 32, 64) == 1


@pytest.mark.parametrize(
    ("major", "async_mma"), [(8, False), (9, True), (10, True), (11, True), (12, False)]
)
def test_limits_of_gpus(monkeypatch, major, async_mma):
    found = SimpleNamespace(
        major=major, multi_processor_count=7, shared_memory_per_block_optin=99 * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    limits = launch.device_limits.__wrapped__(torch.device("cuda"))
    assert limits == (7, 99 * 1024, async_mma)


@NOT_INTERPRETING
def test_a_call_creates_and_reads_no_tensor():
    """Only view operators of torch are called: nothing is allocated, copied or synced."""
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    case = make_case(MIXED, splits=3, sinks=True, window=9, dtype=F16, kv_dtype=FP8_DTYPES[0])
    given = case.query, case.key_cache, case.value_cache, case.batch, case.scale
    out = torch.empty_like(case.query)
    with compiling(90), Record():
        launch.paged_tree_attention(*given, out=out, **case.options)
    assert set(called) <= {"aten.view.dtype", "aten.detach.default"}


WITH_ALL = {"window": 50, "softcap": 30.0, "sinks": True}


@NOT_INTERPRETING
@pytest.mark.parametrize(
    ("capability", "shared", "options"),
    [
        (80, 163, {"heads": (8, 8), "dim": 80, "dtype": F16}),
        (80, 163, {"heads": (4, 2), "dim": 128, "dtype": F32, **WITH_ALL}),
        (89, 99, {"heads": (4, 2), "dim": 256, "dtype": BF16, **WITH_ALL}),
        (90, 227, {"heads": (32, 32), "dim": 128, "dtype": BF16}),
        (90, 227, {"heads": (16, 2), "dim": 128, "dtype": F16, **WITH_ALL}),
        (90, 227, {"heads": (8, 1), "dim": 128, "dtype": BF16, "kv_dtype": FP8_DTYPES[0]}),
        (90, 227, {"heads": (7, 1), "dim": 256, "dtype": F16, "kv_dtype": FP8_DTYPES[1]}),
        (100, 227, {"heads": (8, 2), "dim": 64, "dtype": BF16, **WITH_ALL}),
        (120, 99, {"heads": (8, 8), "dim": 128, "dtype": BF16}),
    ],
    ids=str,
)
def test_it_compiles_without_a_gpu(monkeypatch, tmp_path, capability, shared, options):
    """Within the shared memory assumed for its tiles, and with (nearly) everything in registers.

    A thread's stack holds what did not fit into registers; 160 bytes are 40 of 255.
    """
    limits = tiles.DeviceLimits(100, shared * 1024, 90 <= capability < 120)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)
    case = make_case([tree(64, 100), tree(64, 3)], splits=3, **options)
    with compiling(capability) as compiled:
        case.run(launch.paged_tree_attention)
    assert set(compiled) == {"attend", "merge"}
    for kernel in compiled.values():
        assert kernel.metadata.shared <= shared * 1024
        assert stack_bytes(kernel.asm["cubin"], tmp_path) <= 160
    (_, heads), dim = options["heads"], options["dim"]
    query, key = case.query.element_size(), case.key_cache.element_size()
    made = tiles.tile_sizes(dim, 64 * options["heads"][0] // heads, query, key, limits)
    sizes = tiles.padded_head(dim), made.block_m, made.block_n, made.num_stages
    expected = tiles.shared_bytes(*sizes, query, key, limits.async_mma)
    assert 0 <= expected - compiled["attend"].metadata.shared <= made.block_m * 64 * query + 5120
    ptx = compiled["attend"].asm["ptx"]
    assert "cp.async" in ptx  # keys are prefetched
    assert ("wgmma" in ptx) == (capability == 90)
    # triton#9433: weights are in registers, so no product may be in flight when they are written
    assert set(re.findall(r"wgmma.wait_group.sync.aligned (\d+)", ptx)) <= {"0"}
