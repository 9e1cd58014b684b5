"""Compaction of caches with scattered tokens, one offset per element (vLLM's on CPUs)."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from vllm_medusa.kernels import CPU_DTYPES, cpu_function


class _Caches(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("caches", "token_offsets", "channel_offsets")),
        *((name, c_int64) for name in ("layers", "element_size", "block_size", "block_stride")),
        *((name, c_int64) for name in ("kv_heads", "head_size")),
    ]


class _Moves(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("slots", "path", "num_accepted")),
        *((name, c_int64) for name in ("batch", "width", "columns")),
    ]


_compact_packed = cpu_function("compact_packed", POINTER(_Caches), POINTER(_Moves))


class PackedCaches:
    """The caches of a KV group's layers; a cache shared by several layers is compacted once.

    Each comes with its `scorer.layout.CacheLayout`; caches of equal layouts are moved together.
    """

    def __init__(self, caches: Iterable[tuple[Tensor, Any]]) -> None:
        groups: dict[tuple[Any, int], dict[int, Tensor]] = {}
        for cache, layout in caches:
            assert cache.dtype in CPU_DTYPES, cache.dtype
            groups.setdefault((layout, cache.element_size()), {})[cache.data_ptr()] = cache
        self._groups, self._kept = [], list[Tensor]()  # what the pointers point to
        for (layout, size), own in groups.items():
            pointers = torch.tensor(list(own))
            tokens = layout.token_offsets.contiguous()
            channels = layout.channel_offsets.contiguous()
            self._kept += [*own.values(), pointers, tokens, channels]
            self._groups.append(
                _Caches(
                    pointers.data_ptr(), tokens.data_ptr(), channels.data_ptr(), len(own), size,
                    layout.block_size, layout.block_stride, layout.num_kv_heads, layout.head_size,
                )
            )  # fmt: skip

    def compact(self, slots: Tensor, path_nodes: Tensor, num_accepted: Tensor) -> None:
        """Move every accepted node's KV to the slot of its depth; see `kernel.compact_layers`."""
        slots, path_nodes = slots.to(torch.int64).contiguous(), path_nodes.contiguous()
        num_accepted = num_accepted.contiguous()
        moves = _Moves(
            slots.data_ptr(), path_nodes.data_ptr(), num_accepted.data_ptr(), *slots.shape,
            path_nodes.shape[1],
        )  # fmt: skip
        for group in self._groups:
            _compact_packed(byref(group), byref(moves))
