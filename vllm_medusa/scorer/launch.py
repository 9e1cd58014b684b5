"""Launch of `kernel`: tile sizes, grid and strides; no allocation, no host sync.

Import it late: it imports Triton.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from vllm_medusa import kernels
from vllm_medusa.scorer.kernel import attend, merge
from vllm_medusa.scorer.paged import FP8_DTYPES, MAX_HEAD_SIZE, QUERY_DTYPES, PagedBatch
from vllm_medusa.scorer.tiles import (
    FEWEST_SPLITS,
    DeviceLimits,
    num_splits,
    padded_head,
    tile_sizes,
)

INTERPRETED = kernels.interpreted()


def choose_splits(
    batch_size: int,
    num_heads: int,
    kv_heads: int,
    head_size: int,
    max_query_len: int,
    max_seq_len: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """`tiles.num_splits` for steps of one shape on one device; heads are those of this rank.

    Call it when graphs are captured or a step is planned, not per layer. Cap it at
    `SplitWorkspace.max_splits`.
    """
    limits = device_limits(device)
    rows = max_query_len * (num_heads // kv_heads)
    tiles = tile_sizes(head_size, rows, dtype.itemsize, kv_dtype.itemsize, limits)
    programs = batch_size * kv_heads * -(-rows // tiles.block_m)
    return num_splits(programs, max_seq_len, limits.num_sms, tiles, kv_dtype.itemsize)


def paged_tree_attention(
    query: Tensor,  # fp16, bf16 or fp32 [T, Hq, D]; channels must be contiguous
    key_cache: Tensor,  # [num_blocks, block_size, Hkv, D], any strides; dtype of the queries or fp8
    value_cache: Tensor,  # like ``key_cache``
    batch: PagedBatch,
    scale: float,  # factor on the logits
    *,
    out: Tensor,  # like ``query``; rows outside all requests are unchanged
    softcap: float = 0.0,  # logits become softcap * tanh(logits / softcap); 0: no cap
    window: int | None = None,  # position p attends to positions > p - window; None: all
    sinks: Tensor | None = None,  # [Hq], an additional logit per head, without a value
    k_scale: Tensor | None = None,  # fp32, one element: dequantizes fp8 keys; None: 1
    v_scale: Tensor | None = None,  # the same for values
) -> Tensor:
    """Attend every row to its visible keys; keys and values are in the cache. Returns ``out``.

    Allocates nothing and never waits for the device. vLLM's uint8 caches must be viewed as their
    fp8 dtype; e4m3 needs a GPU of capability 8.9.
    """
    num_rows, num_heads, head_size = query.shape
    kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    batch_size, num_nodes = batch.depths.shape
    kinds = query.dtype, *FP8_DTYPES
    assert query.dtype in QUERY_DTYPES and out.dtype == query.dtype, (query.dtype, out.dtype)
    assert key_cache.dtype == value_cache.dtype in kinds, (key_cache.dtype, value_cache.dtype)
    assert key_cache.shape == value_cache.shape and key_cache.shape[3] == head_size <= MAX_HEAD_SIZE
    assert num_heads % kv_heads == 0, (num_heads, kv_heads)
    assert out.shape == query.shape and query.stride(2) == out.stride(2) == 1
    assert window is None or window >= 1, window
    assert sinks is None or sinks.shape == (num_heads,), sinks
    if num_rows == 0 or batch_size == 0:
        return out
    group = num_heads // kv_heads
    rows = batch.max_query_len * group
    tiles = tile_sizes(
        head_size,
        rows,
        query.element_size(),
        key_cache.element_size(),
        device_limits(query.device),
    )
    tiles_per_request = -(-rows // tiles.block_m)
    padded = padded_head(head_size)
    grid = batch_size * tiles_per_request
    ragged = num_rows * group // tiles.block_m + batch_size
    if ragged < grid:
        grid, tiles_per_request = ragged, 0
    splits = batch.num_splits
    parts = batch.workspace if splits > 1 else None
    assert parts is None or splits <= parts.max_splits(num_rows, num_heads, head_size), splits
    attend[(grid, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        out if parts is None else parts.values,
        None if parts is None else parts.lse,
        batch.cu_query_lens,
        batch.seq_lens,
        batch.block_table,
        batch.is_tree.view(torch.int8),
        batch.ancestor_bits,
        batch.depths,
        sinks,
        k_scale,
        v_scale,
        float(scale),
        float(softcap),
        window or 0,
        batch_size,
        num_heads,
        num_nodes,
        tiles_per_request,
        splits,
        batch.rows_before,
        *query.stride()[:2],
        *key_cache.stride(),
        *value_cache.stride(),
        *out.stride()[:2],
        batch.block_table.stride(0),
        *batch.ancestor_bits.stride(),
        *batch.depths.stride(),
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        IN_PARTS=parts is not None,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap != 0,
        HAS_SINKS=sinks is not None,
        HAS_K_SCALE=k_scale is not None,
        HAS_V_SCALE=v_scale is not None,
        INTERPRETED=INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        splits_padded = max(FEWEST_SPLITS, triton.next_power_of_2(splits))
        merge[(num_rows, num_heads)](
            parts.values,
            parts.lse,
            out,
            batch.cu_query_lens,
            sinks,
            batch_size,
            num_heads,
            splits,
            *out.stride()[:2],
            HEAD_SIZE=head_size,
            HEAD_PADDED=padded,
            SPLITS_PADDED=splits_padded,
            HAS_SINKS=sinks is not None,
            num_warps=8 if splits_padded * padded > 8192 else 4,
        )
    return out


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Cached; a non-CUDA device counts as one multiprocessor."""
    if device.type != "cuda":
        return DeviceLimits()
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", DeviceLimits().shared_bytes)
    async_mma = 9 <= properties.major < 12  # desktop Blackwell (12) multiplies as Ampere does
    return DeviceLimits(properties.multi_processor_count, shared, async_mma)
