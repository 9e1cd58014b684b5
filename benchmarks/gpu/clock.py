"""Clocks: one for CUDA devices, and a stand-in for Triton's interpreter.

There are two kinds of time. *Graph* time replays captured calls without launch overhead, as in a
served model. *Wall* time is the host's waiting time for one eager call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_medusa.kernels import uses_kernel

Call = Callable[[], Any]


def capture(call: Call) -> Call:
    """Capture a call in a CUDA graph; the result repeats it on the same memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up on a side stream, as required by capture
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize()
    replay: Call = graph.replay
    return replay


class CudaClock:
    """CUDA events; the L2 cache is overwritten between runs."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.l2_bytes: int = getattr(properties, "L2_cache_size", 0)
        size = max(4 * self.l2_bytes, 1 << 28)
        self._flush = torch.empty(size, dtype=torch.int8, device="cuda")

    def graph(self, call: Call, repeats: int = 9) -> list[float]:
        """Microseconds of a captured call, one value per run.

        Overwriting the cache takes longer than a launch, so the device never waits for one.
        """
        replay = capture(call)
        replay()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def wall(self, call: Call) -> float:
        """Microseconds of an eager call until the device is done; the median of nine."""
        times = []
        for _ in range(10):  # the first warms up
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    def rates(self) -> dict[str, float]:
        """Bytes per second of a copy (read and written), operations per second of a product."""
        source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_(0, 256)
        copied = torch.empty_like(source)
        copy = statistics.median(self.graph(lambda: copied.copy_(source)))
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = torch.empty_like(a)
        product = statistics.median(self.graph(lambda: torch.mm(a, b, out=out)))
        return {
            "copy_bytes_per_s": 2e6 * source.numel() / copy,
            "matmul_flop_per_s": 2e6 * 8192**3 / product,
        }


class HostClock:
    """Runs the same code in Triton's interpreter; its numbers are meaningless."""

    l2_bytes = 1 << 10

    def graph(self, call: Call, repeats: int = 9) -> list[float]:
        """One run."""
        return [self.wall(call)]

    def wall(self, call: Call) -> float:
        """One run."""
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)

    def rates(self) -> dict[str, float]:
        """Made-up rates."""
        return {"copy_bytes_per_s": 1e9, "matmul_flop_per_s": 1e12}


Clock = CudaClock | HostClock


def here() -> tuple[str, Clock]:
    """Device and clock of this machine.

    Raises RuntimeError: there is no GPU, and Triton is not interpreted.
    """
    if torch.cuda.is_available():
        return "cuda", CudaClock()
    if uses_kernel("cpu"):
        return "cpu", HostClock()
    raise RuntimeError("torch finds no CUDA GPU: nothing was measured")
