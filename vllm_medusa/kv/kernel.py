# mypy: allow-untyped-defs
"""Compaction in Triton: all layers of a KV group, keys and values, in one launch.

A program moves a chunk of the slot, for one request and one layer, along the whole accepted path,
depth by depth upwards. Nothing is overwritten before it is read: parents come before children, so
the accepted node of depth d has index d or more, and distinct nodes have distinct slots. The slot
written at depth d is node d's; a later depth e > d reads from node e or higher, never from node d.
Programs touch disjoint memory, so only the order of depths within each program
matters; a barrier makes its threads follow it. (`copy_slots` reads everything first and needs
no order.)

Caches are addressed through pointers, because a launch takes no list of tensors, and copied as
integers, so that fp8, bf16 and fp32 are copied bit by bit. A cache has one or two dimensions
(block, offset) that count slots; the others, in any layout, reduce to runs of contiguous bytes at
two strides:

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
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # max words that a program moves per depth
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes


@dataclass(frozen=True, eq=False)
class LayerCaches:
    """Caches of one shape, strides, dtype and device; built once, when the caches are created.

    Lengths and strides are in words: the widest integers that a slot's bytes divide into in every
    cache, so that any dtype is copied unchanged.
    """

    caches: tuple[Tensor, ...]  # kept, so that the addresses stay valid
    slot_dims: int | tuple[int, int]
    addresses: Tensor  # int64 [L], on the caches' device
    word: int  # bytes
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
            word=width,
            block_size=offset[0][0] if offset else 1,
            block_stride=words(block[1]),
            offset_stride=words(offset[0][1]) if offset else 0,
            outer=((outer[0][0], words(outer[0][1])), (outer[1][0], words(outer[1][1]))),
            run=words(run),
        )


def compact_layers(
    layers: LayerCaches, slots: Tensor, path_nodes: Tensor, num_accepted: Tensor
) -> None:
    """Move every accepted node's KV to the slot of its depth, in all layers.

    ``slots`` is int64 [B, N], distinct where they are read or written; ``path_nodes`` int64
    [B, D + 1] and ``num_accepted`` int64 [B] come from a `Path`. No host sync.
    """
    batch, columns = path_nodes.shape
    assert slots.shape[0] == num_accepted.shape[0] == batch and num_accepted.is_contiguous()
    (far, far_stride), (near, near_stride) = layers.outer
    words = far * near * layers.run
    chunk = min(_CHUNK, triton.next_power_of_2(words))
    grid = (batch, len(layers.caches), triton.cdiv(words, chunk))
    _compact_kernel[grid](
        layers.addresses,
        slots,
        *slots.stride(),
        path_nodes,
        *path_nodes.stride(),
        num_accepted,
        columns,
        layers.block_stride,
        layers.offset_stride,
        far_stride,
        near_stride,
        BLOCK_SIZE=layers.block_size,
        WORDS=words,
        NEAR=near,
        RUN=layers.run,
        WORD=_WORDS[layers.word],
        CHUNK=chunk,
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


@triton.jit(
    do_not_specialize=("slots_b", "slots_n", "path_b", "path_d", "columns"),
    do_not_specialize_on_alignment=("slots_ptr", "path_ptr", "num_accepted_ptr"),
)
def _compact_kernel(
    addresses_ptr,  # int64 [L], of the caches
    slots_ptr,  # int64 [B, N]
    slots_b,
    slots_n,
    path_ptr,  # int64 [B, D + 1]
    path_b,
    path_d,
    num_accepted_ptr,  # int64 [B]
    columns,  # D + 1
    block_stride,  # all of the cache's strides and lengths in words
    offset_stride,
    far_stride,
    near_stride,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,  # of a slot
    NEAR: tl.constexpr,
    RUN: tl.constexpr,
    WORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    row = (word // RUN).to(tl.int64)
    within = (row // NEAR) * far_stride + (row % NEAR) * near_stride + word % RUN  # [CHUNK]
    slots_ptr += request * slots_b
    path_ptr += request * path_b
    end = tl.minimum(tl.load(num_accepted_ptr + request).to(tl.int32) + 1, columns)
    for depth in range(1, end):
        node = tl.load(path_ptr + depth * path_d)
        src = tl.load(slots_ptr + node * slots_n).to(tl.int64)
        dst = tl.load(slots_ptr + depth * slots_n).to(tl.int64)
        src = (src // BLOCK_SIZE) * block_stride + (src % BLOCK_SIZE) * offset_stride
        dst = (dst // BLOCK_SIZE) * block_stride + (dst % BLOCK_SIZE) * offset_stride
        moves = word < tl.where(node == depth, 0, WORDS)  # no move if the node is in place
        value = tl.load(cache_ptr + src + within, mask=moves)
        tl.store(cache_ptr + dst + within, value, mask=moves)
        tl.debug_barrier()
