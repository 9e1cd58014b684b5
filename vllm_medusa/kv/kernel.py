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

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_medusa.kv.layers import LayerCaches

_CHUNK = 1024  # max words that a program moves per depth
_WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}


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
