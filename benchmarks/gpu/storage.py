"""One large piece of device memory that all timed caches lie in, filled once with random values.

A cache on an H200 can be 34 GB: allocating and filling it anew for each of 200 cases would take
longer than all measurements. Values do matter: on zeros a GPU clocks higher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.cases import NotHere


class Storage:
    """``limit`` is in bytes; with ``fill`` off the memory is only reserved, to compile ahead."""

    def __init__(self, device: str, limit: int, fill: bool = True) -> None:
        self.device = device
        self.limit = limit
        self.fill = fill
        self._pool: Tensor | None = None  # of bytes
        self._kind: torch.dtype | None = None  # what the bytes were filled as

    def take(self, count: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        """``count`` flat tensors that share no memory; as they were left, random at first.

        Raises NotHere if they are more than the limit.
        """
        each = -(-elements * dtype.itemsize // 512) * 512
        if count * each > self.limit:
            raise NotHere(f"{count * each / 1e9:.1f} GB of cache; {self.limit / 1e9:.1f} are free")
        pool = self._of(count * each, dtype)
        used = elements * dtype.itemsize
        return [pool[i * each : i * each + used].view(dtype) for i in range(count)]

    def release(self) -> None:
        """Give the memory back."""
        self._pool = None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _of(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._pool is None or self._pool.numel() < size:
            self.release()
            size = self.limit if self.device == "cuda" else size  # never to be filled again
            self._pool = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._kind = None
        if self.fill and self._kind != dtype:
            _fill(self._pool, dtype)
            self._kind = dtype
        return self._pool


def _fill(pool: Tensor, dtype: torch.dtype) -> None:
    """Normal values; of fp8, any from 0 to 1.875."""
    if dtype.itemsize == 1:
        pool.random_(0, 0x40)
    else:
        pool[: pool.numel() // dtype.itemsize * dtype.itemsize].view(dtype).normal_()
