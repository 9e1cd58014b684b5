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
integers, so that fp8, bf16 and fp32 are copied bit by bit.
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

    A slot is one run of contiguous bytes per head. Lengths and strides are in words: the widest
    integers that these bytes divide into in every cache, so that any dtype is copied unchanged.
    """

    caches: tuple[Tensor, ...]  # kept, so that the addresses stay valid
    addresses: Tensor  # int64 [L], on the caches' device
    word: int  # bytes
    heads: int
    block_size: int
    strides: tuple[int, int, int]  # of blocks, heads and slots of a block
    run: int  # words

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> LayerCaches:
        """Describe ``caches`` [num_blocks, heads, block_size, channels]; channels contiguous."""
        first = caches[0]
        _, heads, block_size, channels = first.shape
        *strides, one = first.stride()
        assert one == 1, first.stride()
        sizes = [first.element_size() * length for length in (*strides, channels)]  # bytes
        addresses = [cache.data_ptr() for cache in caches]
        word = math.gcd(8, *sizes, *addresses)
        block, head, slot, run = (size // word for size in sizes)
        return cls(
            caches=tuple(caches),
            addresses=torch.tensor(addresses, dtype=torch.int64, device=first.device),
            word=word,
            heads=heads,
            block_size=block_size,
            strides=(block, head, slot),
            run=run,
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
    words = layers.heads * layers.run
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
        *layers.strides,
        BLOCK_SIZE=layers.block_size,
        WORDS=words,
        RUN=layers.run,
        WORD=_WORDS[layers.word],
        CHUNK=chunk,
    )


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
    head_stride,
    offset_stride,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,  # of a slot
    RUN: tl.constexpr,
    WORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    within = (word // RUN).to(tl.int64) * head_stride + word % RUN  # [CHUNK]
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
