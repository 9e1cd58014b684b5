# mypy: allow-untyped-defs
"""Fused operations between matrix products, as in a serving engine.

A step of 64 nodes is compared with a plain step. Many small launches would slow down plain steps
and make the comparison unfair. With these three, a layer has ten launches, about as many as in
vLLM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Add x to the residual, in place; returns residual / rms(residual) * weight: [T, H] each."""
    out = torch.empty_like(residual)
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    _add_rms_norm[(rows,)](
        x, residual, weight, out, size, 1e-6, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    return out


def rotate_and_store(
    qkv: Tensor,  # [T, (Hq + 2 Hkv) * D], queries are rotated in place
    positions: Tensor,  # int64 [T]
    slots: Tensor,  # int64 [T]
    cos_sin: Tensor,  # fp32 [positions, D]: cosines, then sines
    key_cache: Tensor,  # [num_blocks, block_size, Hkv, D]
    value_cache: Tensor,
    num_heads: int,
) -> None:
    """RoPE (the halves of a head form the rotation pairs), then keys and values are stored."""
    _, block_size, kv_heads, dim = key_cache.shape
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1
    _rotate_and_store[(qkv.shape[0], num_heads + 2 * kv_heads)](
        qkv,
        positions,
        slots,
        cos_sin,
        key_cache,
        value_cache,
        qkv.stride(0),
        *key_cache.stride()[:3],
        num_heads,
        kv_heads,
        BLOCK_SIZE=block_size,
        HALF=dim // 2,
        num_warps=1,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [T, 2 I] -> [T, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _silu_mul[(rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    total = x + tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row + column, total.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = (total * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + column, out, mask=inside)


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_sin_ptr,
    key_ptr,
    value_ptr,
    qkv_stride,
    stride_block,
    stride_slot,
    stride_head,
    num_heads,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF)
    qkv_ptr += token * qkv_stride + head * 2 * HALF
    first = tl.load(qkv_ptr + lane)
    second = tl.load(qkv_ptr + HALF + lane)
    slot = tl.load(slots_ptr + token)
    target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    if head < num_heads + kv_heads:
        position = tl.load(positions_ptr + token)
        cos = tl.load(cos_sin_ptr + position * 2 * HALF + lane)
        sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + lane)
        left = first.to(tl.float32) * cos - second.to(tl.float32) * sin
        right = second.to(tl.float32) * cos + first.to(tl.float32) * sin
        if head < num_heads:
            tl.store(qkv_ptr + lane, left.to(first.dtype))
            tl.store(qkv_ptr + HALF + lane, right.to(first.dtype))
        else:
            key_ptr += target + (head - num_heads) * stride_head
            tl.store(key_ptr + lane, left.to(key_ptr.dtype.element_ty))
            tl.store(key_ptr + HALF + lane, right.to(key_ptr.dtype.element_ty))
    else:
        value_ptr += target + (head - num_heads - kv_heads) * stride_head
        tl.store(value_ptr + lane, first.to(value_ptr.dtype.element_ty))
        tl.store(value_ptr + HALF + lane, second.to(value_ptr.dtype.element_ty))


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    out = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=inside)
