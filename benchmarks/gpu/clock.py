"""Time on a device, and a stand-in for machines that have none.

Three times are told apart. A *graph* replays calls that were captured, so no launch overhead is in
it: what a served model pays. *Device* time is between two events on the stream. *Wall* time is what
the host waits for one eager call, launches included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

Call = Callable[[], Any]


class Clock(Protocol):
    """What the measurements need of a device."""

    def graph(self, call: Call) -> Call:
        """Capture ``call``; the result repeats what it did, on the same memory."""

    def device(self, call: Call, repeats: int = 9) -> list[float]:
        """Microseconds of ``call`` on the device, nothing of it in the cache: one for each run."""

    def wall(self, call: Call, repeats: int = 15) -> list[float]:
        """Microseconds from before ``call`` until the device is done with it."""


class CudaClock:
    """CUDA events and graphs; between two runs the L2 cache is overwritten."""

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        size = max(4 * l2_bytes, 1 << 28)
        self._flush = torch.empty(size, dtype=torch.int8, device="cuda")

    def graph(self, call: Call) -> Call:
        """Warm up on a side stream, as capturing wants it, then capture."""
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(2):
                call()
        cuda.current_stream().wait_stream(side)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        cuda.synchronize()
        return graph.replay  # type: ignore[no-any-return]

    def device(self, call: Call, repeats: int = 9) -> list[float]:
        """Overwriting the cache takes longer than a launch, so the device never waits for one."""
        cuda = self._torch.cuda
        call()
        cuda.synchronize()
        pairs = []
        for _ in range(repeats):
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            self._flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def wall(self, call: Call, repeats: int = 15) -> list[float]:
        """Host clock, with the device idle at both ends."""
        synchronize = self._torch.cuda.synchronize
        call()
        synchronize()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return times


class HostClock:
    """Runs the same code paths where there is no GPU; its numbers mean nothing for one."""

    def graph(self, call: Call) -> Call:
        """Nothing is captured; one call, as capturing would make."""
        call()
        return call

    def device(self, call: Call, repeats: int = 9) -> list[float]:
        """One run, by the host's clock."""
        return self.wall(call, repeats)

    def wall(self, call: Call, repeats: int = 15) -> list[float]:
        """One run."""
        start = time.perf_counter()
        call()
        return [1e6 * (time.perf_counter() - start)]
