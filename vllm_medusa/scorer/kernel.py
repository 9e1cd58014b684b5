# mypy: allow-untyped-defs
"""Paged tree attention in Triton: one pass over the keys in parts, then a merge.

Rows. The query heads that share a key head are folded into the rows: folded row f of a request is
head ``f % group`` of query row ``f // group``. A program handles ``BLOCK_M`` of them, one key head
and one part of the keys. So the keys of a head are read ``ceil(n * group / BLOCK_M)`` times for a
request of n rows, and once for 64 nodes of a model without grouped heads (BLOCK_M is up to 128);
programs that share keys are adjacent and share them through the L2 cache.

Keys. A request's key tiles are those of its context, counted from the first key inside the
window, then those of its own rows, counted from row 0. So own tiles never straddle two
64-bit words of an ancestor mask, and tiles that are visible to every row run without a mask:

    context 150, 70 rows, BLOCK_N 64      [0 64) [64 128) | [128 150)   [150 214) [214 220)
                                           no mask        | masked       word 0    word 1

A request's first own rows may have no queries (``rows_before``): they are in the cache already.

Without tree or window (prefill), the rows before those of a program count as context too, rounded
down to a whole tile: own tiles then start close to the program's first row, and few are masked.

Parts are whole tiles, evenly distributed over the grid's last axis; a short request leaves some
empty, with an LSE of -inf. Each part's normalized output and LSE go to the workspace and `merge`
combines them by weight; a single part writes the output directly. The grid depends only on shapes
and upper bounds. The softmax runs in base 2; the LSEs of parts are natural logarithms.

To find a program's request without a search, request b owns the tiles from
``cu_query_lens[b] * group // BLOCK_M + b`` on, which is always enough. If all requests have about
the same length, a fixed number of tiles for each is cheaper.

Values that change from step to step are not constants of the kernel and not specialized (for 1 or
multiples of 16), because recompilation would stall a server.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=(
        "window",
        "batch_size",
        "tiles_per_request",
        "num_splits",
        "rows_before",
        "table_stride",
        "bits_stride_request",  # 0 for a static tree, except with a single request
        "depths_stride_request",
    ),
    do_not_specialize_on_alignment=(
        "cu_query_lens_ptr",
        "seq_lens_ptr",
        "block_table_ptr",
        "is_tree_ptr",
    ),
)
def attend(
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    value_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D]; in parts: fp32 [T, Hq, num_splits, D]
    lse_ptr,  # in parts: fp32 [T, Hq, num_splits]
    cu_query_lens_ptr,  # [B + 1]
    seq_lens_ptr,  # [B]
    block_table_ptr,  # [B, max_blocks]
    is_tree_ptr,  # [B]
    ancestor_bits_ptr,  # int64 [B, N, W]
    depths_ptr,  # [B, N]
    sinks_ptr,  # [Hq] or None
    k_scale_ptr,  # [1] or None
    v_scale_ptr,  # [1] or None
    scale,
    softcap,
    window,
    batch_size,
    num_heads,
    num_nodes,  # N
    tiles_per_request,  # 0: compute the request
    num_splits,
    rows_before,
    query_stride_row,
    query_stride_head,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    key_stride_dim,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    value_stride_dim,
    out_stride_row,
    out_stride_head,
    table_stride,
    bits_stride_request,
    bits_stride_node,
    bits_stride_word,
    depths_stride_request,
    depths_stride_node,
    GROUP: tl.constexpr,  # query heads of one key head
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots of a cache block
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 64
    IN_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,  # the interpreter multiplies bf16 incorrectly
):
    """BLOCK_M folded rows of one request and key head over one part of the keys."""
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if tiles_per_request > 0:
        request = pid // tiles_per_request
        m_tile = pid % tiles_per_request
    else:
        before = tl.zeros([128], tl.int32)
        for first in range(0, batch_size, 128):
            other = first + tl.arange(0, 128)
            starts = tl.load(cu_query_lens_ptr + other, mask=other < batch_size, other=0)
            begun = (other < batch_size) & (starts * GROUP // BLOCK_M + other <= pid)
            before += begun.to(tl.int32)
        request = tl.sum(before, 0) - 1
        m_tile = pid - (tl.load(cu_query_lens_ptr + request) * GROUP // BLOCK_M + request)
    first_row = tl.load(cu_query_lens_ptr + request)
    num_rows = tl.load(cu_query_lens_ptr + request + 1) - first_row
    if m_tile * BLOCK_M >= num_rows * GROUP:
        return
    base = tl.load(seq_lens_ptr + request) - num_rows - rows_before  # < 0 in dummy batches only
    tree_rows = tl.where(tl.load(is_tree_ptr + request) != 0, num_nodes, 0)

    # rows: [BLOCK_M]
    folded = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_row = folded // GROUP
    row = rows_before + query_row
    head = kv_head * GROUP + folded % GROUP
    exists = query_row < num_rows
    is_node = exists & (row < tree_rows)
    depth = tl.load(
        depths_ptr + request * depths_stride_request + row * depths_stride_node,
        mask=is_node,
        other=0,
    ).to(tl.int32)
    place = tl.where(is_node, depth, row)  # position after the context
    token = (first_row + query_row).to(tl.int64)
    bits_row_ptr = (
        ancestor_bits_ptr
        + request.to(tl.int64) * bits_stride_request
        + row.to(tl.int64) * bits_stride_node
    )

    channel = tl.arange(0, HEAD_PADDED)
    in_head = channel < HEAD_SIZE
    query = tl.load(
        query_ptr
        + token[:, None] * query_stride_row
        + head[:, None] * query_stride_head
        + channel[None, :],
        mask=exists[:, None] & in_head[None, :],
        other=0.0,
    )  # [BLOCK_M, HEAD_PADDED]

    # key tiles: context_tiles from position left to context, then own tiles from row first_own
    own_end = rows_before + tl.minimum((m_tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_rows)
    left = 0
    context = base
    if HAS_WINDOW:
        lowest = tl.min(tl.where(exists, place, 2147483647), 0)
        left = tl.maximum(base + lowest - window + 1, 0)
        # such rows are outside the window in trees too, as no node is deeper than its index
        first_own = tl.maximum(left - base, 0) // BLOCK_N * BLOCK_N
    else:
        before_all = rows_before + m_tile * BLOCK_M // GROUP  # fully visible except in trees
        before_all = before_all // BLOCK_N * BLOCK_N
        first_own = tl.where(tree_rows > 0, 0, before_all)
        context = base + first_own
    context_tiles = (tl.maximum(context - left, 0) + BLOCK_N - 1) // BLOCK_N
    num_tiles = context_tiles + (own_end - first_own + BLOCK_N - 1) // BLOCK_N
    per_split = (num_tiles + num_splits - 1) // num_splits
    start = tl.minimum(split * per_split, num_tiles)
    stop = tl.minimum(start + per_split, num_tiles)
    whole = start  # tiles before this one are visible to every row
    if not HAS_WINDOW:
        whole = tl.maximum(tl.minimum(tl.maximum(context, 0) // BLOCK_N, stop), start)

    # logits in base 2
    factor = scale
    if HAS_K_SCALE:
        factor = factor * tl.load(k_scale_ptr)
    factor = factor * LOG2E
    if HAS_SOFTCAP:
        factor = factor * 2.0 / softcap
        cap = softcap * LOG2E

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, tl.float32)
    lane = tl.arange(0, BLOCK_N)
    table_row_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    key_head_ptr = key_ptr + kv_head.to(tl.int64) * key_stride_head
    value_head_ptr = value_ptr + kv_head.to(tl.int64) * value_stride_head

    for MASKED in tl.static_range(2):
        if MASKED == 0:
            tile_start = start
            tile_stop = whole
        else:
            tile_start = whole
            tile_stop = stop
        for tile in range(tile_start, tile_stop):
            # columns: [BLOCK_N]
            if MASKED == 0:
                position = tile * BLOCK_N + lane
                block = tl.load(table_row_ptr + position // BLOCK_SIZE).to(tl.int64)
            else:
                is_own = tile >= context_tiles
                own_row = first_own + (tile - context_tiles) * BLOCK_N
                position = tl.where(is_own, base + own_row, left + tile * BLOCK_N) + lane
                end = tl.where(is_own, base + own_end, context)
                filled = (position >= 0) & (position < end)
                block = tl.load(table_row_ptr + position // BLOCK_SIZE, mask=filled, other=0).to(
                    tl.int64
                )
            slot = position % BLOCK_SIZE
            key_ptrs = (
                key_head_ptr
                + block[None, :] * key_stride_block
                + slot[None, :] * key_stride_slot
                + channel[:, None] * key_stride_dim
            )
            value_ptrs = (
                value_head_ptr
                + block[:, None] * value_stride_block
                + slot[:, None] * value_stride_slot
                + channel[None, :] * value_stride_dim
            )
            if MASKED == 0:
                key = tl.load(key_ptrs, mask=in_head[:, None], other=0.0)
                value = tl.load(value_ptrs, mask=in_head[None, :], other=0.0)
            else:
                key = tl.load(key_ptrs, mask=in_head[:, None] & filled[None, :], other=0.0)
                value = tl.load(value_ptrs, mask=in_head[None, :] & filled[:, None], other=0.0)
            key = key.to(query.dtype)  # exact for fp8
            value = value.to(query.dtype)

            if INTERPRETED:
                logits = tl.dot(query.to(tl.float32), key.to(tl.float32), input_precision="ieee")
            else:
                logits = tl.dot(query, key, input_precision="ieee")
            logits = logits * factor
            if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which can't overflow to NaN
                logits = cap * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
            if MASKED == 1:
                other = position - base  # the key's row; negative in the context
                word = tl.load(
                    bits_row_ptr + tl.maximum(own_row, 0) // 64 * bits_stride_word,
                    mask=is_node,
                    other=0,
                )  # [BLOCK_M]
                bit = (word[:, None] >> (other & 63).to(tl.int64)[None, :]) & 1
                attended = (bit != 0) | (row >= tree_rows)[:, None]
                attended = (attended & (other[None, :] <= row[:, None])) | (other < 0)[None, :]
                attended = attended & filled[None, :]
                if HAS_WINDOW:
                    other_is_node = (other >= 0) & (other < tree_rows)
                    other_depth = tl.load(
                        depths_ptr + request * depths_stride_request + other * depths_stride_node,
                        mask=other_is_node,
                        other=0,
                    ).to(tl.int32)
                    other_place = tl.where(other_is_node, other_depth, other)
                    attended = attended & (other_place[None, :] > place[:, None] - window)
                logits = tl.where(attended, logits, float("-inf"))

            new_top = tl.maximum(top, tl.max(logits, 1))
            shift = new_top
            if MASKED == 1:
                shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            if INTERPRETED:
                weights = weights.to(value.dtype).to(tl.float32)
                acc = tl.dot(weights, value.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
            top = new_top

    divisor = tl.where(total > 0.0, total, 1.0)
    acc = acc / divisor[:, None]
    if HAS_V_SCALE:
        acc = acc * tl.load(v_scale_ptr)
    lse = (top + tl.log2(divisor)) * LN2
    result = token * num_heads + head
    if IN_PARTS:
        tl.store(lse_ptr + result * num_splits + split, lse, mask=exists)
        rows_here = tl.where(start < stop, num_rows, 0)  # none for an empty part
        tl.store(
            out_ptr + (result * num_splits + split)[:, None] * HEAD_SIZE + channel[None, :],
            acc,
            mask=(query_row < rows_here)[:, None] & in_head[None, :],
        )
    else:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32)
            larger = tl.maximum(sink, lse)
            share = tl.exp(lse - larger)
            both = share + tl.exp(sink - larger)
            acc = acc * (share / both)[:, None]
        tl.store(
            out_ptr
            + token[:, None] * out_stride_row
            + head[:, None] * out_stride_head
            + channel[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=exists[:, None] & in_head[None, :],
        )


@triton.jit(do_not_specialize=("batch_size", "num_splits"))
def merge(
    values_ptr,  # fp32 [T, Hq, num_splits, D], normalized
    parts_lse_ptr,  # fp32 [T, Hq, num_splits], natural
    out_ptr,  # [T, Hq, D]
    cu_query_lens_ptr,  # [B + 1]
    sinks_ptr,  # [Hq] or None
    batch_size,
    num_heads,
    num_splits,
    out_stride_row,
    out_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Combine the parts of one row and head, weighted by their LSE."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(cu_query_lens_ptr + batch_size):
        return
    result = token.to(tl.int64) * num_heads + head
    part = tl.arange(0, SPLITS_PADDED)
    channel = tl.arange(0, HEAD_PADDED)
    parts_lse = tl.load(
        parts_lse_ptr + result * num_splits + part, mask=part < num_splits, other=float("-inf")
    )
    top = tl.max(parts_lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(parts_lse - shift)  # [SPLITS_PADDED]
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total = total + tl.exp(sink - shift)
    values = tl.load(
        values_ptr + (result * num_splits + part)[:, None] * HEAD_SIZE + channel[None, :],
        mask=(parts_lse > float("-inf"))[:, None] & (channel < HEAD_SIZE)[None, :],
        other=0.0,
    )
    divisor = tl.where(total > 0.0, total, 1.0)
    out = tl.sum(values * weights[:, None], 0) / divisor
    tl.store(
        out_ptr + token.to(tl.int64) * out_stride_row + head * out_stride_head + channel,
        out.to(out_ptr.dtype.element_ty),
        mask=channel < HEAD_SIZE,
    )
