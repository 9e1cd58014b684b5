"""Compaction of the KV caches of many layers in one launch.

Layers whose caches have the same shape and share block tables need the same moves, so one launch
suffices, given the address of each cache and the layout of a slot. A cache has one
or two dimensions (block, offset) that count slots; the others, in any layout, reduce to
runs of contiguous bytes at two strides:

    cache                                          a slot is
    [blocks, block_size, heads, head_size]         1 run of heads * head_size
    [2, blocks, block_size, heads, head_size]      2 runs, for keys and values
    [2, blocks, heads, block_size, head_size]      2 * heads runs of head_size
    [blocks, heads, head_size, block_size]         heads * head_size runs of one element
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, eq=False)
class LayerCaches:
    """Caches of one shape, strides, dtype and device; built once, when the caches are created.

    Lengths and strides are in words: the widest integers that a slot's bytes divide into in every
    cache, so that any dtype is copied unchanged.
    """

    caches: tuple[Tensor, ...]  # kept, so that the addresses stay valid
    slot_dims: int | tuple[int, int]
    addresses: Tensor  # int64 [L], on the caches' device
    word: torch.dtype
    block_size: int  # 1 if one dimension counts slots
    block_stride: int
    offset_stride: int
    outer: tuple[tuple[int, int], tuple[int, int]]  # (length, stride), (length, stride)
    run: int  # contiguous words

    @classmethod
    def of(cls, caches: Sequence[Tensor], slot_dims: int | tuple[int, int] = 0) -> LayerCaches:
        """Describe ``caches`` of the same shape; ``slot_dims`` is as in `copy_slots`.

        Raises:
            ValueError: A slot is scattered at more than two strides.

        """
        first = caches[0]
        dims = (slot_dims,) if isinstance(slot_dims, int) else slot_dims
        counted = [dim % first.ndim for dim in dims]
        block, *offset = ((first.shape[dim], first.stride(dim)) for dim in counted)
        rest = [
            (first.shape[dim], first.stride(dim)) for dim in range(first.ndim) if dim not in counted
        ]
        run, outer = _runs(rest)
        if len(outer) > 2:
            raise ValueError(
                f"a slot of a cache with shape {tuple(first.shape)} and strides {first.stride()} "
                f"has {len(outer)} strides; at most 2 are supported. Use another cache layout"
            )
        outer = [(1, 0)] * (2 - len(outer)) + outer
        size = first.element_size()
        strides = [block[1], *(stride for _, stride in (*offset, *outer))]
        addresses = [cache.data_ptr() for cache in caches]
        width = math.gcd(8, run * size, *(stride * size for stride in strides), *addresses)

        def words(elements: int) -> int:
            return elements * size // width

        return cls(
            caches=tuple(caches),
            slot_dims=slot_dims,
            addresses=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            word=_WORDS[width],
            block_size=offset[0][0] if offset else 1,
            block_stride=words(block[1]),
            offset_stride=words(offset[0][1]) if offset else 0,
            outer=((outer[0][0], words(outer[0][1])), (outer[1][0], words(outer[1][1]))),
            run=words(run),
        )


def _runs(dims: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Merge (length, stride) dims: contiguous elements, then dims over these runs, outer first."""
    merged: list[tuple[int, int]] = []
    for length, stride in sorted(dims, key=lambda dim: dim[1], reverse=True):
        if length == 1:
            continue
        if merged and merged[-1][1] == length * stride:
            length *= merged.pop()[0]
        merged.append((length, stride))
    if merged and merged[-1][1] == 1:
        return merged[-1][0], merged[:-1]
    return 1, merged
